"""``portable-chat``: chat with the model of a run in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.commands import (
    DONE,
    FAILED,
    REFUSED,
    CommandParser,
    ShowVersion,
    exit_without_traceback,
    format_exit_codes,
)
from portable.converters.console import escape_control_characters, is_terminal, print_error, print_line
from portable.converters.errors import to_printable
from portable.errors import RunError, UserError, to_one_line
from portable.formatting import format_count
from portable.paths import FINAL_FOLDER, read_json_file
from portable.terminal import print_status, show_loading_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.data.images import ImageFile
    from portable.data.sources.documents import Message
    from portable.data.tokens.image_processing import ImageProcessor

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CONVERSATION_HELP = (
    "/image PATH adds an image to the next message, /reset starts a new conversation, "
    "/exit or Ctrl-D ends the chat"
)
_IMAGE_COMMAND = "/image"


def find_exported_model(run_folder: str) -> Path:
    """Find the folder with the exported model of a run.

    Args:
        run_folder: Output folder of a run, or a folder with a model or an adapter.

    Returns:
        The subfolder ``final/``, or ``run_folder`` itself.

    Raises:
        UserError: If neither folder contains a model or an adapter.
    """
    folder = Path(run_folder).expanduser()
    for candidate in (folder / FINAL_FOLDER, folder):
        with suppress(OSError, ValueError):
            if any((candidate / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
                return candidate
    with suppress(OSError, ValueError):
        if (folder / "checkpoints").is_dir():
            raise UserError(
                f"RUN: {folder} has no {FINAL_FOLDER}/ yet; finish the run, or export the newest "
                f"checkpoint with portable-convert {folder} OUT and chat with OUT"
            )
    raise UserError(f"RUN: {folder} has no model; specify the output_dir of a run, or a folder with a model")


class ChatModel:
    """A model and its tokenizer, which generate the assistant's answers in a conversation.

    Args:
        folder: Folder with a model, or with an adapter whose base model is available.
        device: Torch device. ``auto`` selects a GPU if there is one.

    Attributes:
        device: Torch device of the model.
        tokenizer: Tokenizer of the model.
        model: The transformers model, wrapped in a ``PeftModel`` if ``folder`` contains an adapter.
    """

    def __init__(self, folder: Path, device: str = "auto") -> None:
        """Load the model and its tokenizer.

        Raises:
            UserError: If the tokenizer, the model or the adapter cannot be loaded.
        """
        import torch

        from portable.data.tokens.tokenizer import load_tokenizer
        from portable.untrusted_settings import check_downloaded_settings, convert_library_errors

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = device
        self._folder = folder
        adapter = (folder / ADAPTER_CONFIG).is_file()
        base = self._base = _read_base_model_name(folder) if adapter else str(folder)
        self.tokenizer: Any = load_tokenizer(str(folder), key="RUN")
        with convert_library_errors("RUN"):
            self.model: Any = _load_base_model(base, torch.device(device))
            if adapter:
                check_downloaded_settings("RUN", str(folder), (ADAPTER_CONFIG,))
                self.model = _add_adapter(self.model, folder)
        self.model.eval()
        self._end_tokens = self._find_end_tokens()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template. Without one, the model continues the user's text."""
        return bool(self.tokenizer.chat_template)

    @cached_property
    def image_processor(self) -> ImageProcessor:
        """Image processor of the model.

        Raises:
            UserError: If the model has no image processor or no chat template.
        """
        from portable.data.tokens.image_processing import PROCESSOR_FILES, load_image_processor

        has_files = any((self._folder / name).is_file() for name in PROCESSOR_FILES)
        processor = load_image_processor(str(self._folder) if has_files else self._base)
        if processor is None or not self.has_template:
            missing = "image processor" if processor is None else "chat template"
            raise UserError(
                f"{_IMAGE_COMMAND}: {self._folder} has no {missing}; use a chat model that accepts images"
            )
        return processor

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """Render a conversation as the prompt for the assistant's next answer.

        Without a chat template, returns the content of the last message.

        Args:
            messages: Conversation so far, as dictionaries with ``role`` and ``content``.

        Raises:
            UserError: If the chat template does not accept the conversation, or takes too much time
                or memory.
        """
        from portable.data.tokens import limited_calls
        from portable.data.tokens.rendering import TemplateRenderer

        if not self.has_template:
            return str(messages[-1]["content"])
        rendering = TemplateRenderer(self.tokenizer.chat_template, self.tokenizer.special_tokens_map)
        text: str = limited_calls.call_within_limits(rendering.render_prompt, messages, "RUN")
        return text

    def _insert_images(self, text: str, images: Sequence[ImageFile]) -> str:
        """Replace each image placeholder in a rendered conversation with the text that represents the image.

        Raises:
            UserError: If the number of placeholders and images differs, or if the processor rejects the
                size of an image.
        """
        pieces = text.split(self.image_processor.placeholder)
        if len(pieces) != len(images) + 1:
            raise UserError(
                f"{_IMAGE_COMMAND}: the rendered conversation contains the image placeholder "
                f"{self.image_processor.placeholder!r} {format_count(len(pieces) - 1, 'time')}, but the "
                f"conversation has {format_count(len(images), 'image')}; start a new "
                "conversation with /reset, and do not write the placeholder in messages"
            )
        try:
            replacements = [self.image_processor.compute_replacement(image.size) for image in images]
        except Exception as error:  # processors raise several types of exceptions
            raise UserError(
                f"{_IMAGE_COMMAND}: the model does not accept an image of this size ({to_one_line(error)}); "
                "start a new conversation with /reset"
            ) from error
        return pieces[0] + "".join(map("".join, zip(replacements, pieces[1:], strict=True)))

    def _build_image_arguments(self, images: Sequence[ImageFile], tokens: Any) -> dict[str, Any]:
        """Build the model inputs for the images in a prompt, on the device of the model.

        Args:
            images: Images, in the order of their placeholders in the prompt.
            tokens: Token ids of the prompt, an int64 tensor of shape ``[1, tokens]`` on the host.
        """
        import torch

        columns = self.image_processor.build_columns(images, tokens.numpy())
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        return {
            name: values.to(self.device, self.model.dtype if values.is_floating_point() else None)
            for name, values in tensors.items()
        }

    def generate_answer(
        self, messages: Sequence[Message], images: Sequence[ImageFile] = (), **options: Any
    ) -> Iterator[str]:
        """Generate an answer in a background thread, and yield its text incrementally.

        Generation starts when the first part is requested, and stops if the caller closes the
        generator.

        Args:
            messages: Conversation so far. Without a chat template, the model continues the last
                message.
            images: Images of the conversation, in the order in which the messages contain them.
            options: Arguments of transformers' ``generate``.

        Yields:
            Parts of the text as soon as they are generated.

        Raises:
            UserError: If the model does not accept the images, or if the conversation cannot be
                rendered or tokenized.
            RunError: If the generation fails.
        """
        import threading

        import torch
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        from portable.data.tokens import bounded_tokenizer

        text = self.render_prompt(messages)
        if images:
            text = self._insert_images(text, images)
        special = {} if not self.has_template else {"add_special_tokens": False}
        encoded = bounded_tokenizer.encode_text(self.tokenizer, text, return_tensors="pt", **special)
        if images:
            options |= self._build_image_arguments(images, encoded["input_ids"])
        tokens = encoded["input_ids"].to(self.device)
        stop = threading.Event()
        streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        failures: list[Exception] = []

        def run_generation() -> None:
            try:
                with torch.no_grad():
                    self.model.generate(
                        input_ids=tokens,
                        attention_mask=torch.ones_like(tokens),
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList([lambda *_, **__: stop.is_set()]),
                        eos_token_id=self._end_tokens or None,
                        pad_token_id=self.tokenizer.pad_token_id or (self._end_tokens or [0])[0],
                        **options,
                    )
            except Exception as error:
                failures.append(error)
                streamer.end()

        thread = threading.Thread(target=run_generation, daemon=True)
        thread.start()
        try:
            yield from streamer
        finally:  # also if the user has interrupted the caller
            stop.set()
            thread.join()
        if failures:
            raise RunError(
                f"RUN: the model could not generate an answer ({to_one_line(failures[0])}); start a shorter "
                "conversation, or use another model"
            ) from failures[0]

    def _find_end_tokens(self) -> list[int]:
        """Find the ids of all tokens that can end an answer.

        The tokens include the end-of-sequence tokens of the generation config and of the tokenizer. A chat
        template may end answers with a different special token, which is found by rendering a short
        conversation.

        Returns:
            Token ids in ascending order. May be empty.
        """
        from portable.data.tokens import bounded_tokenizer

        configured = self.model.generation_config.eos_token_id
        end_tokens = set(configured if isinstance(configured, list) else [configured])
        end_tokens.add(self.tokenizer.eos_token_id)
        if self.has_template:
            probe = "Yes"
            messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": probe}]
            with suppress(UserError):  # the template may not accept this conversation
                rest = self.render_prompt([*messages, {"role": "user", "content": "Hello"}]).rpartition(
                    probe
                )[2]
                tokens = bounded_tokenizer.encode_text(self.tokenizer, rest, add_special_tokens=False)[
                    "input_ids"
                ]
                added = self.tokenizer.added_tokens_decoder
                if tokens and tokens[0] in added and added[tokens[0]].special:
                    end_tokens.add(tokens[0])
        return sorted(token for token in end_tokens if isinstance(token, int))


def _read_base_model_name(folder: Path) -> str:
    """Read the path or Hub id of an adapter's base model.

    The existence of the base model is checked only if its name cannot be a Hub id, for example
    because it begins with a slash or a dot. A relative path is resolved against the current folder.

    Raises:
        UserError: If the config of the adapter cannot be read or does not specify the base model,
            or if the specified folder does not exist.
    """
    try:
        settings = read_json_file(folder / ADAPTER_CONFIG)
    except (OSError, ValueError) as error:
        raise UserError(
            f"RUN: {folder / ADAPTER_CONFIG}: cannot be read ({to_one_line(error)}); export the run again"
        ) from error
    base = settings.get("base_model_name_or_path") if isinstance(settings, dict) else None
    if not isinstance(base, str) or not base:
        raise UserError(
            f"RUN: {folder / ADAPTER_CONFIG} does not specify the base model; merge the adapter with "
            f"portable-convert {folder} OUT --merge-into BASE, and chat with OUT"
        )
    if (base.startswith(("/", ".")) or base.count("/") > 1) and not Path(base).is_dir():
        raise UserError(
            f"RUN: {folder}: the base model of the adapter, {base}, does not exist; run the command in the "
            "folder in which the adapter was trained, or merge the adapter with portable-convert "
            f"{folder} OUT --merge-into BASE, and chat with OUT"
        )
    return base


def _load_base_model(name: str, device: Any) -> Any:
    """Load a model onto a device from safetensors, without running custom code.

    Keeps the dtype of the files, except that float16 is converted to float32 on a CPU.

    Args:
        name: Folder or Hub id of the model.
        device: Torch device.
    """
    import torch

    from portable.model.build import select_pretrained_class

    options: dict[str, Any] = {"dtype": "auto", "use_safetensors": True}
    model = select_pretrained_class(name).from_pretrained(name, **options)
    if device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # fp16 matrix products are slow or not implemented on CPUs
    return model.to(device)


def _add_adapter(model: Any, folder: Path) -> Any:
    """Load an adapter for a base model, and return the PEFT model.

    If the adapter contains embeddings with a different vocabulary size, the embeddings of the base
    model are resized first.

    Args:
        model: Base model. It is changed in place.
        folder: Folder of the adapter.

    Raises:
        UserError: If the folder does not contain the adapter's weights.
    """
    from peft import PeftModel

    from portable.converters import open_checkpoint

    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"RUN: {folder} has no {ADAPTER_WEIGHTS}; export the run again")
    rows, width = model.get_input_embeddings().weight.shape
    for name, tensor in open_checkpoint(folder).tensors.items():
        is_table = "embed" in name and name.endswith(".weight") and ".lora_" not in name
        if is_table and len(tensor.shape) == 2 and tensor.shape[1] == width and tensor.shape[0] != rows:
            model.resize_token_embeddings(tensor.shape[0], mean_resizing=False)
            break
    return PeftModel.from_pretrained(model, str(folder))


def build_chat_parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``portable-chat``."""
    parser = CommandParser(
        prog="portable-chat",
        description="Chat in the terminal with the model or adapter that a run has exported to final/.\n"
        "A model without a chat template continues the text that you type.",
        epilog=f"in the conversation: {_CONVERSATION_HELP}; Ctrl-C stops an "
        f"answer\n\n{format_exit_codes(DONE, FAILED, REFUSED)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, help="print the version and exit")
    parser.add_argument("run", metavar="RUN", help="output_dir of a run, or a folder with a model or adapter")
    parser.add_argument("--prompt", metavar="TEXT", help="print the answer to TEXT and exit")
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="maximum number of tokens per answer (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 always selects the most likely token (default: the temperature in "
        "the model's generation config)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed for sampling (default: 0)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="device of the model; auto (the default) uses a GPU if there is one",
    )
    return parser


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-chat`` and return its exit code. UserErrors and RunErrors are printed, not raised."""
    arguments = build_chat_parser().parse_args(argv)
    try:
        if not 1 <= arguments.max_tokens <= 1 << 20:
            raise UserError(
                f"--max-tokens: {arguments.max_tokens} is out of range; use a number from 1 to {1 << 20}"
            )
        if arguments.temperature is not None and not 0 <= arguments.temperature <= 100:
            raise UserError(
                f"--temperature: {arguments.temperature} is out of range; use a number from 0 to 100"
            )
        folder = find_exported_model(arguments.run)
        with show_loading_message():
            chat = ChatModel(folder, arguments.device)
        _run_conversation(chat, folder, arguments)
    except (UserError, RunError) as error:
        print_error(f"error: {to_printable(error)}")
        return REFUSED if isinstance(error, UserError) else FAILED
    return DONE


def _run_conversation(chat: ChatModel, folder: Path, arguments: argparse.Namespace) -> None:
    """Print the answers to ``--prompt``, or to each line of standard input.

    The answers are printed as they are generated. In standard input, ``/image PATH`` adds an image
    to the next message, ``/reset`` starts a new conversation, and ``/exit`` or ``/quit`` exits. In
    an interactive conversation, a ``UserError`` about a message or an image is printed, and Ctrl-C
    stops only the current answer. Sets torch's random seed.

    Args:
        chat: The loaded model.
        folder: Folder of the model, printed at the start of an interactive conversation.
        arguments: Parsed command line.

    Raises:
        UserError: If ``--system`` is set but the tokenizer has no chat template. In a
            non-interactive conversation, also if a message or an image cannot be used.
        RunError: If generating an answer fails.
    """
    import torch

    options: dict[str, Any] = {"max_new_tokens": arguments.max_tokens}
    if arguments.temperature is not None:
        options |= {"do_sample": arguments.temperature > 0}
        options |= {"temperature": arguments.temperature} if arguments.temperature else {}
    torch.manual_seed(arguments.seed)
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    if system and not chat.has_template:
        raise UserError("--system: the tokenizer has no chat template; remove --system")
    messages: list[Message] = list(system)
    images: list[ImageFile] = []
    num_shown = 0  # number of images that earlier messages contain
    interactive = arguments.prompt is None and is_terminal(sys.stdin)
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401 (line editing and history of input())
        kind = "" if chat.has_template else "; the model has no chat template, so it continues your text"
        print_status(f"loaded {folder} on {chat.device}{kind}. {_CONVERSATION_HELP}.")
    for text in (
        [arguments.prompt] if arguments.prompt is not None else _read_user_messages(interactive=interactive)
    ):
        if text.strip() in ("/exit", "/quit"):
            return
        if text.strip() == "/reset":
            messages, images, num_shown = list(system), [], 0
            continue
        command, _, path = text.strip().partition(" ")
        parts: list[str] = []
        try:
            if command == _IMAGE_COMMAND:
                images.append(_read_image(chat, path.strip()))
                continue
            content = _build_content(text, len(images) - num_shown)
            num_shown = len(images)
            messages.append({"role": "user", "content": content})
            for part in chat.generate_answer(messages, images, **options):
                parts.append(part)
                print(escape_control_characters(part), end="", flush=True)
        except KeyboardInterrupt:
            if not interactive:
                raise
        except UserError as error:
            if not interactive:
                raise
            print_error(f"error: {to_printable(error)}")
            continue
        print_line("")
        messages.append({"role": "assistant", "content": "".join(parts)})


def _read_image(chat: ChatModel, path: str) -> ImageFile:
    """Read an image from a path that the user has entered.

    Raises:
        UserError: If the model does not accept images, or if the file cannot be read.
    """
    from portable.data.images import read_image_file

    chat.image_processor  # noqa: B018 (raises an error if the model does not accept images)
    try:
        return read_image_file(Path(path).expanduser())
    except (ValueError, RuntimeError) as error:  # RuntimeError if the home folder of a user is unknown
        raise UserError(
            f"{_IMAGE_COMMAND}: cannot read {to_one_line(path)[:200]!r} ({error}); specify the path of an "
            "image"
        ) from error


def _build_content(text: str, num_images: int) -> str | list[dict[str, str]]:
    """Build the content of a message: one placeholder per image, followed by the text.

    Without images, the content is the text as a string.
    """
    if not num_images:
        return text
    return [*[{"type": "image"}] * num_images, {"type": "text", "text": text}]


def _read_user_messages(*, interactive: bool) -> Iterator[str]:
    """Yield the non-empty lines of standard input. Prints a prompt if ``interactive`` is True."""
    while True:
        try:
            line = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print_line("")
            return
        if line.strip():
            yield line
