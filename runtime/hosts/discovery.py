"""Find out which process of a run this is, from environment variables or from JAX's own detection."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UserError
from .single import ADDRESS, COUNT, NUMBER

PORT = 8476
"""The port of process 0, unless its address or the variable JAX_COORDINATOR_PORT names one."""


@dataclass(frozen=True)
class Place:
    """A process's place in a run.

    Attributes:
        coordinator: host name or address of process 0.
        port: where process 0 listens.
        count: processes of the run.
        number: of this process, from 0.
    """

    coordinator: str
    port: int
    count: int
    number: int


def discover(hosts: int, environment: Mapping[str, str] | None = None) -> Place | None:
    """Return the place of this process; None if the run has one process.

    Args:
        hosts: machines that the recipe's mesh spans. The variables take precedence.
        environment: None for os.environ.

    Raises:
        UserError: when the place cannot be found out, or the variables are incomplete.
    """
    variables = os.environ if environment is None else environment
    variables_set = [name for name in (ADDRESS, COUNT, NUMBER) if variables.get(name)]
    if variables_set:
        place = _explicit(variables, variables_set)
    elif hosts > 1:
        place = _detected(hosts, variables)
    else:
        return None
    return place if place.count > 1 else None


def _explicit(variables: Mapping[str, str], names: list[str]) -> Place:
    missing = [name for name in (ADDRESS, COUNT, NUMBER) if name not in names]
    if missing:
        raise UserError(
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} set, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not",
            f"set all three, on each host: {ADDRESS}=HOST:PORT of process 0, {COUNT}, {NUMBER}; or none",
        )
    count, number = (_whole(variables, name) for name in (COUNT, NUMBER))
    if count < 1 or number >= count:
        raise UserError(
            f"{NUMBER} is {number}, and {COUNT} is {count}", f"{NUMBER} counts from 0 to {COUNT} - 1"
        )
    host, port = _address(variables[ADDRESS], ADDRESS)
    return Place(host, port, count, number)


def _detected(hosts: int, variables: Mapping[str, str]) -> Place:
    """Let JAX detect it: on Cloud TPU VMs from metadata; on GKE, under Slurm and MPI from variables."""
    from jax._src.clusters import ClusterEnv

    try:
        address, count, number, _ = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, 300
        )
    except Exception as error:  # from any of the clusters that JAX may detect
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _unknown(hosts, f" ({why})") from None
    if address is None or count is None or number is None:
        raise _unknown(hosts)
    if number >= count:
        raise _unknown(hosts, f" (process {number} of {count})")
    return Place(_address(address, ADDRESS)[0], _port(variables), int(count), int(number))


def _unknown(hosts: int, why: str = "") -> UserError:
    return UserError(
        f"the recipe's mesh spans {hosts} hosts, and no variable says which of them this is{why}",
        f"start the script on each host, with {ADDRESS}=HOST:PORT of the first, {COUNT}={hosts} and "
        f"{NUMBER}=0 to {hosts - 1}; on Cloud TPU VMs and GKE no variables are needed",
    )


def _port(variables: Mapping[str, str]) -> int:
    return _address(f"localhost:{variables.get('JAX_COORDINATOR_PORT') or PORT}", "JAX_COORDINATOR_PORT")[1]


def _whole(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"{name} is {text!r}, which is not a whole number", f"unset {name}, or give a number")
    return int(text)


def _address(text: str, name: str) -> tuple[str, int]:
    """Return host and port of "host", "host:port", "[::1]" or "[::1]:port"."""
    host, colon, port = text, "", ""
    if bracketed := re.fullmatch(r"\[([^]]*)](:?)(.*)", text):
        host, colon, port = bracketed.groups()
    elif text.count(":") == 1:
        host, colon, port = text.partition(":")
    number = int(port) if re.fullmatch("[0-9]{1,5}", port) else 0
    sound = 0 < number < 65536 if colon else not port
    if not host or not sound or re.search(r"[\[\]/\s]", host):
        raise UserError(
            f"{name} is {text!r}, which is not of the form HOST:PORT", f"{name}=10.0.0.2:{PORT}, for example"
        )
    return host, number or PORT
