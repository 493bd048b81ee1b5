"""Number types of the schema. Each type has bounds, and a comment with the reason for them.

The bounds reject numbers that are almost certainly mistakes: it is better to report an error before
the start than to overflow, loop endlessly or fill the disk later. A field may narrow the bounds of
its type, for example with ``Field(ge=1)``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from portable.untrusted_settings import MAX_MODEL_LAYERS

MAX_STEPS = 10**9
MAX_LEARNING_RATE = 1000
MAX_BATCH_SIZE = 1 << 24
MAX_SEQUENCE_LENGTH = 1 << 24
MAX_RANKS = 1 << 20
MAX_TRAINED_VOCABULARY = 1_000_000


@dataclass(frozen=True)
class BoundsReason:
    """Comment in a type annotation that explains the bounds of a number. It has no effect.

    Attributes:
        text: Reason for the bounds.
    """

    text: str


Steps = Annotated[
    int,
    Field(ge=0, le=MAX_STEPS),
    BoundsReason(
        "A billion steps of ten milliseconds take four months; with MAX_BATCH, samples fit in 64 bits."
    ),
]
Samples = Annotated[
    int,
    Field(ge=0, le=MAX_STEPS * MAX_BATCH_SIZE),
    BoundsReason("No run of MAX_STEPS consumes more samples."),
]
BatchSize = Annotated[
    int,
    Field(ge=1, le=MAX_BATCH_SIZE),
    BoundsReason("Sixteen million sequences are far above the critical batch size of the largest models."),
]
Length = Annotated[
    int,
    Field(ge=1, le=MAX_SEQUENCE_LENGTH),
    BoundsReason(
        "The longest contexts have ten million tokens, and shorter samples are padded to this length."
    ),
]
GeneratedTokens = Annotated[
    int, Field(ge=0, le=1 << 20), BoundsReason("A sample for a person to read; each token is a forward pass.")
]
ChunkTokens = Annotated[
    int, Field(ge=0, le=1 << 31), BoundsReason("More tokens than any micro-batch has; their logits must fit.")
]
Ranks = Annotated[
    int, Field(ge=1, le=MAX_RANKS), BoundsReason("The largest clusters have fewer accelerators.")
]
Processes = Annotated[
    int, Field(ge=0, le=1024), BoundsReason("The largest machines have fewer cores for a rank.")
]
PartCount = Annotated[
    int, Field(ge=1, le=1 << 20), BoundsReason("Each part is open and has a thread's attention.")
]
Interval = Annotated[
    int, Field(ge=1, le=MAX_STEPS), BoundsReason("A run of MAX_STEPS has no more of anything.")
]
Records = Annotated[
    int, Field(ge=1, le=10**12), BoundsReason("The largest datasets have billions of records.")
]
Pixels = Annotated[
    int, Field(ge=256, le=10**8), BoundsReason("16 x 16 pixels at least; larger images are not decoded.")
]
ModuleSize = Annotated[
    int, Field(ge=0, le=10**15), BoundsReason("The largest models have trillions of weights.")
]
VocabularySize = Annotated[
    int,
    Field(ge=300, le=MAX_TRAINED_VOCABULARY),
    BoundsReason(
        "256 bytes and special tokens at least; larger vocabularies than a million are not trained."
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31), BoundsReason("Token IDs are 32-bit integers.")]
LayerNumber = Annotated[int, Field(ge=0, lt=MAX_MODEL_LAYERS), BoundsReason("No model has more layers.")]
Dimension = Annotated[int, Field(ge=0, lt=64), BoundsReason("Tensors of torch have at most 64 dimensions.")]
AdapterRank = Annotated[
    int, Field(ge=1, le=1 << 16), BoundsReason("A rank above the width of a layer adds nothing.")
]
Seed = Annotated[int, Field(ge=0, lt=1 << 32), BoundsReason("numpy's generators take 32 bits.")]
ScalePower = Annotated[
    int, Field(ge=0, le=32), BoundsReason("A loss times 2 to the 33rd overflows fp16 at once.")
]

Fraction = Annotated[float, Field(ge=0, le=1), BoundsReason("A share of a whole.")]
ProperFraction = Annotated[float, Field(ge=0, lt=1), BoundsReason("A share of 1 would leave nothing.")]
AverageDecay = Annotated[
    float, Field(gt=0, lt=1), BoundsReason("0 is no average, and an average with decay 1 never changes.")
]
LearningRate = Annotated[
    float,
    Field(gt=0, le=MAX_LEARNING_RATE),
    BoundsReason("Adam moves each weight by the rate; the largest rates in use, of linear probes, are tens."),
]
WeightDecay = Annotated[
    float, Field(ge=0, le=1000), BoundsReason("Decay times rate above 2 lets weights grow without end.")
]
Epsilon = Annotated[
    float,
    Field(ge=1e-37, le=1),
    BoundsReason("Smaller numbers are zero in fp32; larger ones than 1 outweigh every second moment."),
]
GradientNorm = Annotated[
    float,
    Field(gt=0, le=1e18),
    BoundsReason("The square of a larger norm is infinite in fp32; null is no clipping."),
]
LossWeight = Annotated[float, Field(ge=0, le=1), BoundsReason("A regularizer does not outweigh the loss.")]
NoiseScale = Annotated[
    float, Field(ge=0, le=1000), BoundsReason("Embeddings of larger noise have no text left.")
]
AdapterScale = Annotated[
    float, Field(gt=0, le=1e6), BoundsReason("A larger scale overflows fp16 activations.")
]
LossScale = Annotated[float, Field(gt=0, le=2.0**32), BoundsReason("The largest initial scale.")]
Threshold = Annotated[float, Field(ge=0, le=1e9), BoundsReason("Metrics are shares, losses or perplexities.")]
Epochs = Annotated[
    float, Field(gt=0, le=1e6), BoundsReason("A million passes over one sample are MAX_STEPS / 1000.")
]
Weight = Annotated[
    float,
    Field(ge=0, le=1e18),
    BoundsReason("Weights are proportions; numbers of tokens serve as weights, too."),
]
Gigabytes = Annotated[float, Field(gt=0, le=1e9), BoundsReason("An exabyte: no machine has such a disk.")]
Minutes = Annotated[float, Field(ge=0, le=525_600), BoundsReason("A year: a longer outage is never noticed.")]
Seconds = Annotated[float, Field(gt=0, le=31_536_000), BoundsReason("A year: null is no limit.")]
