"""What a miniature is taught, in which order.

A recipe is a list of levels. Training goes up a level when the running share of right answers to
needles passes `pass_at`; lengths are therefore raised by success, not by time.
"""

from dataclasses import dataclass, field, replace

from mini.tasks import Load


@dataclass(frozen=True)
class Level:
    """One step of the curriculum."""

    length: int
    """Tokens a sample."""
    speedup: float | None = 1.0
    """Factor on the log decay of every GDN head; None leaves GDN only its convolution."""
    attends: bool = True
    """False leaves the FA sublayers out, so that GDN has to learn first."""
    mix: dict[str, float] = field(default_factory=dict)
    """Task -> share of the samples."""
    keys: int = 8
    """Keys of a needle sample, variables of a tracking sample."""
    questions: int = 4
    hops: int = 1
    packed: float = 0.5
    """Share of the needle samples without text between the records."""
    cut: float = 0.0
    """Share of the steps on needles alone with the states emptied before the questions."""
    drill: float = 0.0
    """Share of the steps spent on short samples of tracking, common words and copying."""
    ease: float = 1.0
    """Factor on the learning rate."""
    pass_at: float = 0.9
    alphabet: tuple[int, int] = (512, 90)
    """How many words serve as keys, and how many numbers as values."""
    batch_tokens: int = 4096
    """Tokens a step."""

    def drilled(self, length: int = 64, hops: int = 1) -> "Level":
        """The level of a drill: the same, but short, and without needles and text."""
        batch = self.batch_tokens // 2
        return replace(self, length=length, hops=hops, mix=DRILL, batch_tokens=batch, cut=0)

    def load(self, packed: bool) -> Load:
        """The hardness of this level's recall tasks; packed ones ask half of what they hold."""
        questions = self.length // 8 - 1 if packed else self.questions
        return Load(self.length, self.keys, questions, self.hops, packed, self.alphabet)


@dataclass(frozen=True)
class Recipe:
    """A curriculum and the settings of the optimiser."""

    levels: tuple[Level, ...]
    rate: float = 5e-3
    """Learning rate of the matrices (Muon); the rest (AdamW) has 0.4 times as much."""
    copier: bool = True
    """FA starts by attending to similar tokens and copying them."""
    base: str = ""
    """Run whose weights are the start."""
    anew: bool = True
    """Of a base, whether FA starts anew all the same, adding nothing at first."""
    family: str = "qwen3_5_text"
    """`model_type` of its configuration."""
    shape: dict[str, int] = field(default_factory=dict)
    """Changes to the shape of the model."""


WARM = {"needles": 0.6, "copy": 0.15, "text": 0.25}
MIXED = {"needles": 0.5, "text": 0.5}
DRILL = {"track": 0.35, "common": 0.35, "copy": 0.3}
BROAD = {"needles": 0.4, "track": 0.1, "common": 0.1, "text": 0.4}

RECIPES = {
    "retrieval": Recipe(
        (
            Level(64, None, mix=WARM, packed=1.0, alphabet=(32, 12)),
            Level(64, None, mix=WARM, packed=1.0, alphabet=(128, 24)),
            Level(128, None, mix=WARM, packed=1.0),
            Level(256, None, mix=WARM, keys=16),
            *(
                Level(256, speedup, mix=MIXED, keys=16, pass_at=0.8)
                for speedup in (1000, 100, 30, 10, 3, 1)
            ),
            *(
                Level(
                    length, 1.0, mix=MIXED, keys=keys, packed=0.3, drill=0.3, ease=0.4, pass_at=0.85
                )
                for length, keys in ((256, 16), (512, 32), (1024, 48), (2048, 64))
            ),
            Level(1024, mix=BROAD, keys=48, packed=0.2, drill=0.6, ease=0.4, pass_at=0.94),
            Level(2048, mix=BROAD, keys=64, packed=0.2, drill=0.8, ease=0.4, pass_at=2.0),
        )
    ),
    "state": Recipe(
        (
            Level(
                64, 1.0, attends=False, mix=WARM, packed=1.0, alphabet=(32, 12), batch_tokens=2048
            ),
            Level(64, 1.0, attends=False, mix=WARM, packed=1.0, batch_tokens=2048),
            Level(128, 1.0, attends=False, mix=WARM, keys=8, batch_tokens=2048),
            Level(256, 1.0, mix=MIXED, keys=12, drill=0.3, ease=0.4),
            Level(512, 1.0, mix=MIXED, keys=16, drill=0.3, ease=0.4),
        ),
        copier=False,
        base="retrieval",
    ),
    "olmo": Recipe(
        (
            Level(64, attends=False, mix=WARM, packed=1.0, alphabet=(32, 12), batch_tokens=2048),
            Level(64, attends=False, mix=WARM, packed=1.0, alphabet=(128, 24), batch_tokens=2048),
            Level(64, attends=False, mix=WARM, packed=1.0, batch_tokens=2048),
            Level(128, attends=False, mix=WARM, batch_tokens=2048),
            Level(256, mix=MIXED, keys=12, ease=0.4, pass_at=2.0),
        ),
        copier=False,
        family="olmo_hybrid",
    ),
    "tracking": Recipe(
        (
            Level(256, mix=BROAD, keys=12, packed=0.3, drill=0.8, ease=0.8, pass_at=0.95),
            Level(512, mix=BROAD, keys=16, packed=0.3, drill=0.5, ease=0.6, pass_at=2.0),
        ),
        copier=False,
        base="state",
        anew=False,
    ),
}
