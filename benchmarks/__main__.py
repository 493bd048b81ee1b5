"""List the benchmarks with their comparisons, requirements, and approximate run times on two cores."""

from __future__ import annotations

PROGRAMS = {
    "train_overhead": ("the step beside a bare loop, Accelerate and the Trainer", "", "8 minutes"),
    "zero": ("the step under ZeRO beside bare DeepSpeed and the Trainer", "deepspeed", "6 minutes"),
    "xla": ("the step on XLA beside a bare torch_xla loop", "torch_xla", "5 minutes"),
    "gpu": ("the step beside its peers, strategies, saving, a profile", "a GPU", "25 minutes there"),
    "tokenizing": ("the speed of tokenizing, and what a kill costs", "", "2 minutes"),
    "convert": ("the converter beside cp and each framework's own tool", "10 GB of disk", "15 minutes"),
    "kills": ("a run that is killed a hundred times, on a disk or in a bucket", "", "an hour"),
    "ranks": ("messages of a step, the death of a rank, a resume on fewer ranks", "", "5 minutes"),
    "soak": ("a run of an hour, whose memory and descriptors must not grow", "", "an hour"),
    "checkpoint_scale": (
        "a save and a resume by the number of ranks; steps during a save",
        "2 GB of disk",
        "5 minutes",
    ),
    "plan": ("planned memory beside the allocator's", "", "3 minutes"),
    "tpu_compile": (
        "planned memory of a TPU beside what libtpu's compiler says",
        "torch_xla, libtpu",
        "hours",
    ),
}
"""Description, required packages, and run time of each benchmark, keyed by name."""


def main() -> None:
    """Print the list of the benchmarks."""
    for name, (what, needs, takes) in PROGRAMS.items():
        needed = f"; needs {needs}" if needs else ""
        print(f"python -m benchmarks.{name:<16}{what}", f"{'':<8}takes {takes}{needed}", sep="\n")
    print("--help of each tells its options; --json FILE writes every figure")


if __name__ == "__main__":
    main()
