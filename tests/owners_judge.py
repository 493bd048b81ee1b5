"""Load model folders with one program of `tests.owners`: a script that runs with that program's packages.

Standard input is a JSON object with the folder of each case. The last line of the output is ``VERDICTS`` and
a JSON object with a verdict for each case:

- ``error``: Error of the program, or an empty string.
- ``missing``, ``unexpected``: Names of tensors that the program did not find or did not use.
- ``logits``: File with the logits of `TOKENS`, ``[tokens, vocabulary]`` as float32.
- ``gguf``: File that the converter of llama.cpp wrote, instead of ``logits``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TOKENS = list(range(5, 29))
VOCABULARY = 320
"""Number of tokens of a trained ``tokenizer.model``."""


def load_with_transformers(folder: Path) -> dict[str, Any]:
    """Load a folder with transformers 4.57, which initializes missing tensors."""
    import torch
    import transformers

    assert transformers.__version__.startswith("4.57."), transformers.__version__
    adapter = folder / "adapter_config.json"
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.exists() else folder
    config = transformers.AutoConfig.from_pretrained(base)
    model_class = getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(
        base, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    if adapter.exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([TOKENS])).logits[0]
    names = {
        "missing": [*info["missing_keys"], *map(str, info["mismatched_keys"])],
        "unexpected": list(info["unexpected_keys"]),
    }
    return {**names, "logits": save(folder, logits.float().numpy())}


def list_defaults(_: Path) -> dict[str, Any]:
    """Return the default config of each model type of transformers 4.57, see `tests/earlier_keys.py`."""
    import transformers

    types = {}
    for model_type in transformers.CONFIG_MAPPING:
        try:
            types[model_type] = transformers.CONFIG_MAPPING[model_type]().to_dict()
        except Exception:  # Some configs require another package or nested configs.
            continue
    common = sorted(transformers.PretrainedConfig().to_dict())
    defaults = {"version": transformers.__version__, "common": common, "types": types}
    return dict(json.loads(json.dumps(defaults, default=str)))


def read_configs(folder: Path) -> dict[str, Any]:
    """Return the values that transformers 4.57 reads from the configs of a folder, keyed by file name."""
    import transformers

    configs: dict[str, Any] = {}
    for file in folder.glob("*.json"):
        try:
            configs[file.stem] = transformers.AutoConfig.from_pretrained(file).to_dict()
        except Exception as error:
            configs[file.stem] = f"{type(error).__name__}: {error}"
    return {"configs": json.loads(json.dumps(configs, default=str))}


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

    define_missing_constants(gguf)
    file = folder / "model.gguf"
    architecture = get_model_architecture(ModelBase.load_hparams(folder, False), ModelType.TEXT)
    model_class = get_model_class(architecture)
    # The converter recognizes known tokenizers by their hashes, but not the tokenizer of the samples.
    model_class.get_vocab_base_pre = lambda *_: "gpt-2"
    model_class.set_vocab = lambda self: self._set_vocab_gpt2()
    with torch.inference_mode():
        model_class(folder, gguf.LlamaFileType.ALL_F32, file).write()
    return {"missing": [], "unexpected": [], "gguf": str(file)}


def train_sentencepiece(folder: Path) -> dict[str, Any]:
    """Train the ``tokenizer.model`` of a folder on its ``corpus.txt``."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        num_threads=1,
        minloglevel=2,
    )
    return {}


def define_missing_constants(gguf: Any) -> None:
    """Define constants of architectures that the converter's own copy of gguf does not have yet.

    Otherwise, the files with these architectures cannot be imported, even for other architectures.
    """
    import conversion

    for file in Path(conversion.__path__[0]).glob("*.py"):
        for kind, name in re.findall(r"gguf\.(MODEL_ARCH|MODEL_TENSOR)\.(\w+)", file.read_text("utf-8")):
            if not hasattr(getattr(gguf, kind), name):
                setattr(getattr(gguf, kind), name, None)


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


def main(program: str, command: str = "") -> None:
    """Judge the folders that standard input names."""
    judge = globals()[command] if command else JUDGES[program]
    verdicts: dict[str, Any] = {}
    for case, folder in json.load(sys.stdin).items():
        try:
            verdicts[case] = {"error": "", **judge(Path(folder))}
        except Exception as error:
            verdicts[case] = {"error": f"{type(error).__name__}: {error}"[:500]}
    print("VERDICTS", json.dumps(verdicts))


if __name__ == "__main__":
    main(*sys.argv[1:])
