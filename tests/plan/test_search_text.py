"""Tests of what `recipe plan --search` prints, word for word. The figures are made up."""

from __future__ import annotations

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.plan_text import search_text as text
from recipec.compiler.plan.results import Memory, Point, Search

GIB = 2**30


def a_point(*sets: str, token: float = 1e-4, gib: float = 70.0, usd: float | None = 0.467) -> Point:
    return Point(
        sets=sets,
        status="compiled",
        reason="",
        tokens=11_919,
        bound_seconds_per_token=0.8e-4,
        seconds_per_token=token,
        step_seconds=token * 11_919,
        memory=Memory(gib * GIB, 0, 0, 0, 0, 0, 0, 95.0 * GIB),
        usd_per_million_tokens=usd,
        mfu=0.62,
        exposed_seconds=0.178,
    )


def test_search_text_shows_the_front_and_the_fastest_recipe_lines(program: Program) -> None:
    points = (
        a_point(token=1.115e-4, gib=72.5),
        a_point("mesh.axes={fsdp: 2, tp: 2}", "train.micro_batch_size=2", token=1.083e-4, gib=58.1),
        a_point("remat.policy=decoder", token=1.432e-4, gib=24.8),
        Point(("model.attention=dot",), "too large", "it needs 131.0 GiB of 95.0 GiB", 11_919, 1.0e-4),
        Point(("remat.policy=block",), "pruned", "even its bound is behind a", 11_919, 1.2e-4),
        Point(("mesh.axes={fsdp: 1, tp: 4}",), "failed", "the compile was killed", 2_980, 1.2e-4),
        Point(("train.micro_batch_size=3",), "refused", "E0501: not a multiple", 0, 0),
        Point(("train.micro_batch_size=5",), "refused", "E0501: not a multiple", 0, 0),
    )
    found = Search(points, (1, 2), 0, 412.0, ("2 configurations could still be better: because.",))
    assert text(program, found) == EXPECTED


EXPECTED = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  mesh   micro  remat    attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
  2 x 2      2  none     splash  auto     0.1083  1.291  58.1  61 %  62 %  0.467  0.178
  4 x 1      1  decoder  splash  auto     0.1432  1.707  24.8  26 %  62 %  0.467  0.178
mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
micro-batch. GiB, HBM: of each device, and the share of its memory. US$/M: of a million real tokens.
waits: seconds of a step that the device waits for collectives and copies, a part of `step`.

The recipe as it stands is not one of them. The fastest takes 0.971 times its time a token.
  mesh   micro  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
  4 x 1      1  none   splash  auto     0.1115  1.329  72.5  76 %  62 %  0.467  0.178

The fastest, as lines of the recipe:
  mesh:
    axes: {fsdp: 2, tp: 2}
  train:
    micro_batch_size: 2

8 configurations in 412 s: 3 compiled, 1 too large, 1 pruned, 2 refused, 1 failed.
2 configurations could still be better: because.
  refused, 2 x: E0501: not a multiple
  failed, 1 x: the compile was killed
"""


def test_search_text_without_a_price_shows_raised_batch_and_device_seconds(program: Program) -> None:
    tight = a_point(
        "train.global_batch_size=8", "train.micro_batch_size=2", token=1.05e-4, gib=93.0, usd=None
    )
    found = Search((a_point(token=1.1e-4, usd=None), tight), (1, 0), 0, 4.0)
    assert text(program, found) == RAISED


RAISED = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  mesh   micro  rows  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  dev-s/M  waits
  4 x 1      2     8  none   splash  auto     0.1050  1.251  93.0  98 %  62 %      420  0.178
  4 x 1      1     4  none   splash  auto     0.1100  1.311  70.0  74 %  62 %      440  0.178
mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
micro-batch. GiB, HBM: of each device, and the share of its memory. dev-s/M: seconds of all devices
together for a million real tokens; there is no price. waits: seconds of a step that the device
waits for collectives and copies, a part of `step`.

The recipe as it stands is number 2 of them. The fastest takes 0.955 times its time a token.

The fastest, as lines of the recipe:
  train:
    global_batch_size: 8
    micro_batch_size: 2
It raises train.global_batch_size from 4 to 8: another optimization, with fewer steps over the same
data.

2 configurations in 4.0 s: 2 compiled.
"""


def test_search_text_offers_no_lines_if_the_recipe_is_the_fastest(program: Program) -> None:
    said = text(program, Search((a_point(),), (0,), 0, 1.0))
    assert (
        "The recipe as it stands is the fastest of them.\n\n1 configuration in 1.0 s: 1 compiled.\n" in said
    )
    assert "as lines of the recipe" not in said


def test_search_text_says_when_no_configuration_fits(program: Program) -> None:
    large = Point((), "too large", "it needs 131.0 GiB of 95.0 GiB", 11_919, 1.0e-4)
    assert text(program, Search((large,), (), None, 3.0)) == NOTHING


NOTHING = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  none: nothing that was compiled fits

The recipe as it stands has no estimate: it needs 131.0 GiB of 95.0 GiB.

1 configuration in 3.0 s: 1 too large.
"""
