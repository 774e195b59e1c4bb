"""What no layout records, or only some do: decided from the file, from what is known, or asked for.

Every function looks at the file first. What the file says is never overruled: a statement of the
user that contradicts it is refused. What the file leaves open is taken from the statement, then
from a published drafter that this one is recognised as, then it is an error that names the choices
and the option: each of these, guessed wrong, runs and only loses acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from dspark.draft.config import LAYER_ID_ORIGIN
from dspark.draft.rope_file import ROPE_KEYS, rope_from_dict
from dspark.draft.shapes import BLOCK_CAUSAL
from dspark.interop.keys import Keys
from dspark.interop.known import Known
from dspark.interop.spec import SLOT_LAYOUTS, Given, Rope
from dspark.taps import TAP_KINDS

HIDDEN_STATES = "hidden_states_index"
"""Origin of ids that count the embedding as 0: completed layer + 1, as speculators has them."""

Value = TypeVar("Value")


class Undecided(ValueError):
    """A field that neither the file nor the user nor knowledge decides; `key` is its name."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass
class Decider:
    """Decides one field after another and remembers why.

    Attributes:
        keys: The file.
        given: What the user states.
        known: The published drafter that this is, if it is one.
        reasons: A sentence for everything that the file did not say.
    """

    keys: Keys
    given: Given
    known: Known | None = None
    reasons: list[str] = field(default_factory=list)

    def tap_kind(self) -> str:
        """What a tap holds."""
        in_file = self.keys.take("target_tap_kind", "a string")
        trained = self.known.tap_kind if self.known else None
        kinds = self.given.target.tap_kinds if self.given.target else TAP_KINDS
        hint = f" ({self.known.tap_hint})" if self.known and self.known.tap_hint else ""
        kind = self._settle(
            "target_tap_kind",
            "--tap-kind",
            in_file,
            self.given.tap_kind,
            trained,
            TAP_KINDS,
            hint,
            only=kinds[0] if len(kinds) == 1 else None,
        )
        if kind not in kinds and self.given.target:
            raise ValueError(
                f"target_tap_kind: {kind!r} is not offered by the target {self.given.target.name}, "
                f"which has {', '.join(kinds)}"
            )
        return kind

    def check_slots(self) -> None:
        """Which slots predict; only the layout in which the anchor does is run here."""
        votes = {
            "sample_from_anchor": (self.keys.take("sample_from_anchor", "true or false"), True),
            "dspark_bonus_anchor": (self.keys.take("bonus_anchor", "true or false"), False),
            "shift_label": (self.keys.take("shift_label", "true or false"), True),
        }
        stated = {
            key: SLOT_LAYOUTS[value is not anchor]
            for key, (value, anchor) in votes.items()
            if value is not None
        }
        if len(set(stated.values())) > 1:
            raise ValueError(f"sample_from_anchor: {stated} contradict each other")
        trained = SLOT_LAYOUTS[0] if self.known else None
        layout = self._settle(
            "sample_from_anchor",
            "--slot-layout",
            next(iter(stated.values()), None),
            self.given.slot_layout,
            trained,
            SLOT_LAYOUTS,
            " (anchor: slot 0 predicts, as DeepSpec trains; mask: only the mask slots do)",
        )
        if layout != SLOT_LAYOUTS[0]:
            raise ValueError(
                "sample_from_anchor: false, slot layout 'mask': the anchor does not predict; "
                "drafters of that layout are not run here, only those of layout 'anchor'"
            )

    def block_causal(self, slides: bool, default: str | None) -> str:
        """Which layers let a slot see only the slots before it.

        Args:
            slides: Whether any layer has a window.
            default: What it means in this layout if a file with windows has no key; None: unknown.
        """
        own = self.keys.take("block_causal", "a string")
        causal = self.keys.take("causal", "true or false", "dflash_query_causal")
        free = self.keys.take("sliding_window_non_causal", "true or false")
        found = own
        if found is None and causal is not None:
            found = "all" if causal else "none"
        elif found is None and free is not None and slides:
            found = "none" if free else "sliding"
        if not slides and found is None:
            return self.given.block_causal or "none"
        return self._settle(
            "block_causal",
            "--block-causal",
            found,
            self.given.block_causal,
            None,
            BLOCK_CAUSAL,
            " (whether a slot of a layer with a window sees only the slots before it)",
            only=default,
        )

    def mask_token_id(self) -> int:
        """The id whose embedding fills the slots after the anchor."""
        in_file = self.keys.take(
            "mask_token_id", "an integer", "pard_token", "dspark_noise_token_id"
        )
        return self._settle(
            "mask_token_id",
            "--mask-token-id",
            in_file,
            self.given.mask_token_id,
            self.known.mask_token_id if self.known else None,
            (),
            " (K3 drafters use 163837, 163824, 163592 or 163605: each its own)",
        )

    def block_size(self) -> int:
        """Slots of a block."""
        in_file = self.keys.take("block_size", "an integer")
        return self._settle(
            "block_size",
            "--block-size",
            in_file,
            self.given.block_size,
            self.known.block_size if self.known else None,
            (),
            " (proposals per round as trained)",
        )

    def num_target_layers(self, in_file: int | None) -> int:
        """Decoder layers of the target."""
        target = self.given.target.num_layers if self.given.target else None
        return self._settle(
            "num_target_layers",
            "--target-layers",
            in_file,
            self.given.num_target_layers,
            self.known.num_target_layers if self.known else None,
            (),
            " (layers of the target; --target knows them)",
            only=target,
        )

    def rope(self) -> Rope:
        """Base and scaling of rotary positions."""
        raw = self.keys.merged(*ROPE_KEYS)
        found = None
        if any(value is not None for value in raw.values()):
            found = Rope(*rope_from_dict(raw))
        revisions = self.known.ropes if self.known else {}
        listed = "; ".join(f"{name}: {rope}" for name, rope in revisions.items())
        hint = (
            f" (revisions: {listed})" if listed else " (THETA, or THETA,FACTOR,ORIGINAL for YaRN)"
        )
        rope = self._settle("rope_parameters", "--rope", found, self.given.rope, None, (), hint)
        if revisions and not any(_same_rope(rope, one) for one in revisions.values()):
            assert self.known
            raise ValueError(
                f"rope_parameters: {rope} is no revision of {self.known.name}: {listed}; "
                "the wrong one only shows on long texts"
            )
        for name, one in revisions.items():
            if _same_rope(rope, one):
                self.reasons.append(f"rope: {one}, {name}")
        return rope

    def layer_ids(self, in_file: list[Any], origin: str) -> tuple[int, ...]:
        """Completed layers, counted from 0, of ids that count from `origin` in this layout."""
        stated = self.keys.take("layer_id_origin", "a string")
        if stated not in (None, origin):
            raise ValueError(f"layer_id_origin: {stated!r} given, this layout has {origin!r}")
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in in_file):
            raise ValueError(
                f"target_layer_ids: {in_file!r} given, a list of integers was expected"
            )
        shift = 0 if origin == LAYER_ID_ORIGIN else 1
        return tuple(item - shift for item in in_file)

    def _settle(
        self,
        key: str,
        option: str,
        in_file: Value | None,
        stated: Value | None,
        trained: Value | None,
        choices: tuple[str, ...],
        hint: str,
        only: Value | None = None,
    ) -> Value:
        """One field: the file's word, else the user's, else what is known, else an error."""
        for source, value in (("the file says", in_file), ("it was trained with", trained)):
            if value is not None and stated not in (None, value):
                name = f"{self.known.name}: " if self.known and source != "the file says" else ""
                raise ValueError(f"{option} {stated}: {name}{key}: {source} {value}")
        if in_file is not None and trained is not None and in_file != trained:
            assert self.known
            raise ValueError(
                f"{key}: the file says {in_file}, {self.known.name}, whose shape this has, was "
                f"trained with {trained}; restore the published value"
            )
        if in_file is not None:
            return in_file
        for value, reason in (
            (stated, f"as stated by {option}"),
            (trained, f"as {self.known.name} was trained" if self.known else ""),
            (only, "the only one possible here"),
        ):
            if value is not None:
                self.reasons.append(f"{key}: {value}, {reason}")
                return value
        listed = f": give {option} {'|'.join(choices)}" if choices else f": give {option}"
        raise Undecided(
            key, f"{key}: not in the file, and a wrong guess only costs speed{listed}{hint}"
        )


def _same_rope(left: Rope, right: Rope) -> bool:
    """Equal where it matters: the base, the factor and the length it starts from."""
    return str(left) == str(right)
