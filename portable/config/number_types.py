"""Number types of the schema. Each type has bounds, and a comment with the reason for them.

The bounds reject numbers that are almost certainly mistakes. The user then gets an error before the
run starts, instead of an overflow, an endless loop or a full disk later. A field may narrow the
bounds of its type, for example with ``Field(ge=1)``.
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
        "A billion steps of ten milliseconds take four months, and the number of samples fits in 64 bits."
    ),
]
Samples = Annotated[
    int,
    Field(ge=0, le=MAX_STEPS * MAX_BATCH_SIZE),
    BoundsReason("A run of MAX_STEPS steps cannot consume more samples."),
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
    int,
    Field(ge=0, le=1 << 20),
    BoundsReason("People read the generated text, and each token needs a forward pass."),
]
ChunkTokens = Annotated[
    int,
    Field(ge=0, le=1 << 31),
    BoundsReason("No micro-batch has more tokens, because their logits must fit in memory."),
]
Ranks = Annotated[
    int, Field(ge=1, le=MAX_RANKS), BoundsReason("Even the largest clusters have fewer accelerators.")
]
Processes = Annotated[
    int, Field(ge=0, le=1024), BoundsReason("Even the largest machines have fewer cores per rank.")
]
PartCount = Annotated[
    int, Field(ge=1, le=1 << 20), BoundsReason("All these parts of the stream are open at the same time.")
]
Interval = Annotated[
    int,
    Field(ge=1, le=MAX_STEPS),
    BoundsReason("A run of MAX_STEPS steps has at most this many steps, evaluations and checkpoints."),
]
Records = Annotated[
    int, Field(ge=1, le=10**12), BoundsReason("The largest datasets have billions of records.")
]
Pixels = Annotated[
    int,
    Field(ge=256, le=10**8),
    BoundsReason("An image has at least 16 x 16 pixels, and larger images are not decoded."),
]
ModuleSize = Annotated[
    int, Field(ge=0, le=10**15), BoundsReason("The largest models have trillions of weights.")
]
VocabularySize = Annotated[
    int,
    Field(ge=300, le=MAX_TRAINED_VOCABULARY),
    BoundsReason(
        "A vocabulary contains at least 256 bytes and the special tokens, and at most a million tokens."
    ),
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31), BoundsReason("Token IDs are 32-bit integers.")]
LayerNumber = Annotated[int, Field(ge=0, lt=MAX_MODEL_LAYERS), BoundsReason("No model has more layers.")]
Dimension = Annotated[int, Field(ge=0, lt=64), BoundsReason("Tensors of torch have at most 64 dimensions.")]
AdapterRank = Annotated[
    int, Field(ge=1, le=1 << 16), BoundsReason("A rank above the width of a layer has no effect.")
]
Seed = Annotated[
    int,
    Field(ge=0, lt=1 << 32),
    BoundsReason("The random number generators of numpy accept seeds of 32 bits."),
]
ScalePower = Annotated[
    int, Field(ge=0, le=32), BoundsReason("A loss times 2 to the 33rd overflows fp16 at once.")
]

Fraction = Annotated[float, Field(ge=0, le=1), BoundsReason("A share is a number from 0 to 1.")]
ProperFraction = Annotated[
    float, Field(ge=0, lt=1), BoundsReason("With a share of 1, nothing would be left.")
]
AverageDecay = Annotated[
    float,
    Field(gt=0, lt=1),
    BoundsReason("A decay of 0 means no average, and an average with decay 1 never changes."),
]
LearningRate = Annotated[
    float,
    Field(gt=0, le=MAX_LEARNING_RATE),
    BoundsReason("The largest learning rates in use, for linear probes, are below 100."),
]
WeightDecay = Annotated[
    float,
    Field(ge=0, le=1000),
    BoundsReason("If weight decay times learning rate is above 2, weights grow without limit."),
]
Epsilon = Annotated[
    float,
    Field(ge=1e-37, le=1),
    BoundsReason("Smaller numbers are zero in fp32, and larger numbers are larger than every second moment."),
]
GradientNorm = Annotated[
    float,
    Field(gt=0, le=1e18),
    BoundsReason("The square of a larger norm is infinite in fp32. Null disables clipping."),
]
LossWeight = Annotated[
    float, Field(ge=0, le=1), BoundsReason("A regularization term must not have more weight than the loss.")
]
NoiseScale = Annotated[
    float, Field(ge=0, le=1000), BoundsReason("With more noise, the text has no influence on the embeddings.")
]
AdapterScale = Annotated[
    float, Field(gt=0, le=1e6), BoundsReason("A larger scale overflows fp16 activations.")
]
LossScale = Annotated[
    float, Field(gt=0, le=2.0**32), BoundsReason("The largest initial loss scale is 2 to the power of 32.")
]
Threshold = Annotated[
    float,
    Field(ge=0, le=1e9),
    BoundsReason("Metrics are shares, losses or perplexities, which do not differ by more."),
]
Epochs = Annotated[
    float,
    Field(gt=0, le=1e6),
    BoundsReason("Even with a thousand steps per epoch, a million epochs are MAX_STEPS steps."),
]
Weight = Annotated[
    float,
    Field(ge=0, le=1e18),
    BoundsReason("Weights are proportions, and may be numbers of tokens."),
]
Gigabytes = Annotated[
    float, Field(gt=0, le=1e9), BoundsReason("No machine has a disk of more than an exabyte.")
]
Minutes = Annotated[float, Field(ge=0, le=525_600), BoundsReason("No outage lasts longer than a year.")]
Seconds = Annotated[
    float,
    Field(gt=0, le=31_536_000),
    BoundsReason("A limit of more than a year has no effect. Null means no limit."),
]
