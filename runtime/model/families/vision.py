"""What a multimodal checkpoint has besides its language model: a vision tower, and a projector.

A tower turns the patches of a picture into features. The projector makes of them what takes the place of the
embeddings of the picture's tokens. Each kind of tower is described by a class in a module of this folder, and
computed by the module of the same name in runtime/model/vision/. Nothing here imports jax or numpy.

The names of a tower's tensors do not follow the prefix of the language model's: transformers saves and loads
the same checkpoint under several.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .base import Parameter, Source, Spec, UnsupportedCheckpoint, linear, plain
from .description import ACTIVATIONS

PATH = "vision"
"""The path of the tower and its projector in the model."""


@dataclass(frozen=True, kw_only=True)
class VisionArchitecture(ABC):
    """The description of a checkpoint's tower and projector.

    Attributes:
        kind: the name of the module in runtime/model/vision/ that computes it.
        prefixes: what the names of its tensors begin with, by the parts that a checkpoint may name apart:
            "vision_tower": "model.vision_tower.".
        hidden_size, intermediate_size, num_heads, num_layers: of the tower.
        patch_size: width and height of a patch, in pixels.
        channels: of a pixel.
        text_size: features of the projector's output, the hidden size of the language model.
        eps: of the tower's norms.
        activation: of the tower's feed-forward blocks.
        both_ways: kinds of layers of the language model in which the tokens of one picture see each other,
            whatever their order.
        within_window: whether they do so only within the layer's window.
    """

    KIND: ClassVar[str]

    prefixes: tuple[tuple[str, str], ...] = ()
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_layers: int
    patch_size: int
    channels: int = 3
    text_size: int
    eps: float = 1e-6
    activation: str = "gelu"
    both_ways: tuple[str, ...] = ()
    within_window: bool = False

    @property
    def kind(self) -> str:
        return self.KIND

    @property
    def head_dim(self) -> int:
        """Return the features of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patch_features(self) -> int:
        """Return the numbers of a patch: its pixels' channels, in the order of the first weight."""
        return self.channels * self.patch_size**2

    @property
    def patches(self) -> int | None:
        """Return the patches of a picture if all pictures have as many; else None."""
        return None

    @property
    @abstractmethod
    def patches_of_feature(self) -> int:
        """Return how many patches become a feature, which takes the place of a token."""

    @abstractmethod
    def parameters(self) -> list[Parameter]:
        """Return the arrays of tower and projector, with their default shardings."""

    def frozen(self) -> list[Parameter]:
        """Return `parameters`, none of which is trained."""
        return [replace(parameter, frozen=True) for parameter in self.parameters()]

    def full_name(self, name: str) -> str:
        """Return a tensor's name in the checkpoint, from its name in transformers' model."""
        first, _, rest = name.partition(".")
        return dict(self.prefixes).get(first, f"model.{first}.") + rest

    def dense(
        self, path: str, name: str, features: tuple[int, int], spec: Spec = ("fsdp", "tp"), bias: bool = True
    ) -> list[Parameter]:
        """Return a linear layer's weight [in, out], and its bias.

        Args:
            path: of the module in the tower.
            name: of transformers' module: "vision_tower.encoder.layers.0.mlp.fc1".
            features: in and out.
            spec: of the weight; a bias is split as its outputs are.
        """
        full = self.full_name(name)
        out = [self.array(f"{path}.kernel", features, spec, linear(f"{full}.weight", *features))]
        if bias:
            out.append(
                self.array(f"{path}.bias", features[1:], spec[1:], plain(f"{full}.bias", features[1:]))
            )
        return out

    def norm(self, path: str, name: str, size: int, bias: bool = True) -> list[Parameter]:
        """Return the weight of a norm, and its bias."""
        full = self.full_name(name)
        out = [self.array(f"{path}.w", (size,), (None,), plain(f"{full}.weight", (size,)))]
        if bias:
            out.append(self.array(f"{path}.bias", (size,), (None,), plain(f"{full}.bias", (size,))))
        return out

    def patch_embedding(self, path: str, name: str, features: int, bias: bool) -> list[Parameter]:
        """Return the convolution of patches, as the weight [numbers of a patch, features] and its bias."""
        full, shape = self.full_name(name), (features, self.channels, self.patch_size, self.patch_size)
        source = Source(f"{full}.weight", shape, (features, self.patch_features), (1, 0))
        out = [self.array(f"{path}.kernel", (self.patch_features, features), (None, "tp"), source)]
        if bias:
            out.append(self.array(f"{path}.bias", (features,), ("tp",), plain(f"{full}.bias", (features,))))
        return out

    def array(self, path: str, shape: tuple[int, ...], spec: Spec, source: Source) -> Parameter:
        """Return an array of the tower, whose tensor has its full name."""
        return Parameter(f"{PATH}.{path}", shape, spec, (replace(source, outside=True),))


def prefixes_of(
    tensors: Iterable[str], candidates: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, str], ...]:
    """Return what the names of a checkpoint's parts begin with.

    Args:
        tensors: names of all its tensors; empty if they are not known.
        candidates: of each part, the beginnings that occur, the longest of those with the same start first.
            The last one is taken if the tensors show none.
    """
    names = tuple(tensors)
    return tuple(
        (part, next((start for start in starts if any(n.startswith(start) for n in names)), starts[-1]))
        for part, starts in candidates.items()
    )


def activation_of(vision: Mapping[str, Any], default: str) -> str:
    """Read the activation of a vision_config."""
    activation = vision.get("hidden_act") or default
    if activation not in ACTIVATIONS:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_act of vision_config is {activation!r}; known are {', '.join(ACTIVATIONS)}",
            "vision_config",
        )
    return str(activation)
