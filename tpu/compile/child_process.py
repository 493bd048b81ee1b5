"""Run code in child processes that return their results in a file.

Tracing and compilation run in child processes, because libtpu and the runtimes can terminate their
process.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from portable.converters.interrupts import block_interrupts_in_children
from portable.errors import UserError, to_one_line
from portable.plugins import build_python_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_DIE_WITH_PARENT_SOURCE = "from portable.ranks.parent_death import die_with_parent; die_with_parent(); "


def run_in_child_process(
    source: str,
    answer_path: Path,
    *arguments: str,
    request: Any,
    environment: Mapping[str, str],
    format_failure: Callable[[int, str], str],
    on_output_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run Python source in a child process, and return the answer that it writes.

    The child process ends when this process ends. Its standard error output goes to a file next to
    ``answer_path``, with the additional suffix ``.log``. The exit code is ignored if the process
    writes an answer.

    Args:
        source: Source code that calls :func:`write_answer`. The ``arguments`` begin at index 2 in
            ``sys.argv``.
        answer_path: File for the answer. It must not exist yet.
        *arguments: Arguments of the process.
        request: Picklable value that :func:`read_request` returns in the child process.
        environment: Complete environment of the child process, to which ``TPU_LOG_DIR`` is added.
        format_failure: Function that returns the error message if the process writes no answer. It
            receives the exit code and the standard error output. The exit code is the negative
            signal number if a signal ended the process.
        on_output_line: Callback that receives each line that the process prints.

    Returns:
        The answer.

    Raises:
        UserError: If the process writes no answer, or if the answer contains the key ``refused``.
            The value of this key is then the error message.
    """
    log = answer_path.with_name(f"{answer_path.name}.log")
    with log.open("wb") as errors, block_interrupts_in_children():
        process = subprocess.Popen(
            build_python_command(_DIE_WITH_PARENT_SOURCE + source, str(answer_path), *arguments),
            env={
                **environment,
                "TPU_LOG_DIR": str(answer_path.parent),
            },  # otherwise libtpu leaves megabytes of logs in /tmp
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin as stdin:
                stdin.write(pickle.dumps(request))
            for line in process.stdout:
                on_output_line(line.decode("utf-8", "replace").strip())
        except BaseException:
            process.kill()
            raise
    if not answer_path.exists():
        raise UserError(format_failure(process.returncode, log.read_text("utf-8", "replace")))
    result: dict[str, Any] = json.loads(answer_path.read_text("utf-8"))
    if "refused" in result:
        raise UserError(result["refused"])
    return result


def describe_exit(exit_code: int, error_output: str) -> str:
    """Describe, for an error message, why a child process ended without writing its result.

    Args:
        exit_code: Exit code of the process.
        error_output: Standard error output of the process.

    Returns:
        The last line of the output, or a sentence with the exit code if the output is empty.
    """
    lines = error_output.strip().splitlines()
    return to_one_line(lines[-1]) if lines else f"the child process ended with exit code {exit_code}"


def read_request() -> Any:
    """Read this child process's request from standard input."""
    return pickle.load(sys.stdin.buffer)  # noqa: S301  (from the parent)


def write_answer(values: Mapping[str, Any]) -> None:
    """Write the result of this child process atomically to its answer file.

    The parent process reads this file. The file contains ``values`` as JSON. The peak memory of
    this process in bytes is added as ``host_bytes``, unless ``values`` already has this key.
    """
    answer = Path(sys.argv[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    partial = answer.with_name(f"{answer.name}.partial")
    partial.write_text(json.dumps({"host_bytes": peak, **values}), "utf-8")
    partial.rename(answer)


def write_answer_and_exit(values: Mapping[str, Any]) -> NoReturn:
    """Write the answer of this child process to its parent, and end the process immediately.

    A normal exit would wait a long time for threads of the runtime or the compiler.

    Args:
        values: Content of the answer, which is written as JSON. See :func:`write_answer`.
    """
    write_answer(values)
    sys.stderr.flush()
    os._exit(0)
