"""Load model folders with one program of `tests.owners`: a script that runs with that program's packages.

Standard input is a JSON object with the folder of each case. The last line of the output is ``VERDICTS`` and
a JSON object with a verdict for each case:

- ``error``: What the program raised, or an empty string.
- ``missing``, ``unexpected``: Names of tensors that the program did not find or did not use.
- ``logits``: File with the logits of `TOKENS`, ``[tokens, vocabulary]`` as float32.
- ``gguf``: File that the converter of llama.cpp wrote, instead of ``logits``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = list(range(5, 29))


def load_with_transformers(folder: Path) -> dict[str, Any]:
    """Load a folder with transformers 4.57, which initializes what it does not find."""
    import torch
    import transformers

    assert transformers.__version__.startswith("4.57."), transformers.__version__
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor([TOKENS])).logits[0]
    names = {
        "missing": [*info["missing_keys"], *map(str, info["mismatched_keys"])],
        "unexpected": list(info["unexpected_keys"]),
    }
    return {**names, "logits": save(folder, logits.float().numpy())}


def load_with_mlx(folder: Path) -> dict[str, Any]:
    """Load a folder with mlx-lm, whose strict loader raises ValueError for missing and unknown tensors."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(folder, lazy=False, strict=True)
    logits = model(mx.array([TOKENS]))[0].astype(mx.float32)
    return {"missing": [], "unexpected": [], "logits": save(folder, np.array(logits))}


def convert_for_llama_cpp(folder: Path) -> dict[str, Any]:
    """Convert a folder with llama.cpp's own converter, which raises ValueError for unknown tensors."""
    import gguf
    import torch
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    file = folder / "model.gguf"
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    model_class = get_model_class(architecture)
    # The tokenizer of the samples is not one of those that the converter recognizes by their hashes.
    model_class.get_vocab_base_pre = lambda *_: "gpt-2"
    model_class.set_vocab = lambda self: self._set_vocab_gpt2()
    with torch.inference_mode():
        model_class(folder, gguf.LlamaFileType.ALL_F32, file).write()
    return {"missing": [], "unexpected": [], "gguf": str(file)}


def save(folder: Path, logits: Any) -> str:
    """Write logits next to the weights, and return the path."""
    file = folder / f"{sys.argv[1]}.npy"
    np.save(file, logits)
    return str(file)


JUDGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "transformers4": load_with_transformers,
    "mlx": load_with_mlx,
    "llama_cpp": convert_for_llama_cpp,
}


def main(program: str) -> None:
    """Judge the folders that standard input names."""
    verdicts: dict[str, Any] = {}
    for case, folder in json.load(sys.stdin).items():
        try:
            verdicts[case] = {"error": "", **JUDGES[program](Path(folder))}
        except Exception as error:
            verdicts[case] = {"error": f"{type(error).__name__}: {error}"[:500]}
    print("VERDICTS", json.dumps(verdicts))


if __name__ == "__main__":
    main(sys.argv[1])
