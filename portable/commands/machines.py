"""Launch files for cloud launchers and job schedulers, such as SkyPilot and Slurm.

``portable-train init --for`` creates the files from the templates in ``configs/machines``. In a
template, ``@name@`` is a placeholder for a value. A line that begins with a condition is kept only
if the condition is true. For example, ``@several@`` is true if there are several nodes with GPUs.
See :data:`_LINE_CONDITIONS`.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from glob import iglob
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import portable
from portable.config import keys, load_config
from portable.config.run_config import RunConfig
from portable.config.sources import (
    format_eval_source_key,
    format_training_source_key,
    get_evaluation_sources,
    get_training_sources,
)
from portable.converters.storage.path_or_url import is_url
from portable.errors import UserError, require
from portable.planner.device_lookup import load_rental_device_names, parse_devices
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from importlib.resources.abc import Traversable

    from portable.planner.device import Device

_LINE_CONDITIONS = ("several", "mixed", "alike", "selected")
"""Names of conditions at the beginning of lines in a template.

``several``: there are several nodes with GPUs. ``mixed``: some of the acceptable machines have GPUs and
others TPUs. ``alike``: all of them have GPUs, or all have TPUs. ``selected``: node labels select a TPU
slice."""
_PLACEHOLDER = re.compile(r"@(\w+)@")
_UNSAFE_IN_PACKAGE = re.compile(r"[^\w .,@:/+=\[\]~<>!-]|: |^-| #")
"""Matches characters in the value of ``--install`` that are not safe in a shell or in YAML, even in
quotes."""
_VERSION = metadata.version("portable-trainer")
_UNSAFE_IN_NAME = re.compile(r"[^\w./:@+=,-]|^[^\w./]|:$", re.ASCII)
"""Matches characters that are not safe in an unquoted word in a shell or in YAML.

Quotes cannot be added, because some templates insert the word into a longer quoted text.
"""
_MULTI_DEVICE_PROGRAMS = ("sky", "dstack")
"""Programs that can choose among several types of devices, so that ``--device`` may be repeated."""
_GPU_ONLY_PROGRAMS = ("dstack", "hf-jobs", "slurm")
"""Programs that do not offer TPUs."""
_TEMPLATE_INDENTS = {"jobset": (24, 16), "trainjob": (10, 26)}
"""Number of spaces before the config text and before the node labels, for templates that contain them."""
_BUCKET_SECRETS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_KEY"),
    "abfss": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_KEY"),
}
"""Environment variables that contain the credentials of a bucket, keyed by the scheme of the bucket's URL.

Google's buckets need none, because Google's machines have service accounts.
"""


@dataclass(frozen=True)
class RentedMachines:
    """Machines to rent, all with the same type of device.

    Attributes:
        device: Type of device, with the properties that the planner uses.
        num_devices: Total number of devices in all machines.
        rental_names: Facts about renting this type of device, from ``configs/machines/names.yaml``.
            The mapping contains the name of the device in programs with their own names for
            devices, keyed by program (for example ``sky: A100-80GB``). For TPUs, it contains
            properties such as the number of chips per host.
    """

    device: Device
    num_devices: int
    rental_names: Mapping[str, Any]

    @property
    def is_tpu(self) -> bool:
        """Whether the devices are TPUs."""
        return "cuda" not in self.device.backends

    @property
    def num_nodes(self) -> int:
        """Number of machines, or of hosts in a TPU slice. Each has the same number of devices.

        Always 1 for a TPU slice that is small enough for one host.
        """
        if not self.is_tpu:
            return max(1, self.num_devices // self.device.devices_per_node)
        fits_on_one_host = self.num_devices <= self.rental_names.get("alone", self.rental_names["host"])
        return 1 if fits_on_one_host else self.num_devices // self.rental_names["host"]

    @property
    def accelerator_type(self) -> str:
        """Accelerator type of a TPU slice, such as ``v5litepod-8``.

        The number in the type is the number of chips, except for ``v4`` and ``v5p``. Their types
        contain the number of cores, which is twice as large. GPUs have no accelerator type, and
        cause a ``KeyError``.
        """
        return f"{self.rental_names['type']}-{self.num_devices * self.rental_names.get('cores', 1)}"

    def get_device_name(self, program: str) -> str:
        """Return the name that a launch program uses for the device in its config.

        Args:
            program: Key of the program in ``configs/machines/names.yaml``: ``sky`` or ``dstack``.

        Returns:
            The name from ``configs/machines/names.yaml``. If that file has no name for this
            program, the planner's device name in upper case.
        """
        return str(self.rental_names.get(program, self.device.name.upper()))


class LocalFileSetting(NamedTuple):
    """A setting whose value is a file or folder on this machine.

    Attributes:
        key: Dotted key of the setting.
        value: Value of the setting.
    """

    key: str
    value: Any


def list_launch_templates(folder: Traversable) -> dict[str, Traversable]:
    """Return all launch templates, keyed by the value of ``--for`` that selects them.

    Args:
        folder: Folder ``configs/machines``.
    """
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {file.name.partition(".")[0]: file for file in files if file.name != "names.yaml"}


def _check_can_launch(
    target: str, config_file: Path, machines: Sequence[RentedMachines], output_dir: str, install: str | None
) -> None:
    """Check that the run can start on the rented machines.

    Also checks that the output of the run is not lost with the machines.

    Args:
        target: Value of ``--for``.
        config_file: The YAML file of the run.
        machines: Machines to rent, one entry per ``--device``.
        output_dir: Output folder of the run, or its URL.
        install: Value of ``--install``, or None.

    Raises:
        UserError: If a device is an AMD GPU and ``install`` is None, because pip then installs
            PyTorch for NVIDIA GPUs. Also raised if the output is not in an object store, unless
            ``target`` is ``slurm``. Also raised if the name of the config file or ``output_dir``
            contains characters that would need quotes in the generated launch file, or if
            ``install`` contains characters that are not safe even in quotes.
    """
    for kind in machines:
        require(
            install is not None or not kind.device.name.startswith("mi"),
            f"--device: {kind.device.name} is an AMD GPU, but by default pip installs PyTorch for NVIDIA "
            "GPUs; add --install with a package that installs portable-trainer and PyTorch for ROCm",
        )
    require(
        is_url(output_dir) or target == "slurm",
        f"output_dir: {output_dir} would be lost with the machine; set output_dir to a URL, such as "
        f"s3://bucket/{Path(output_dir).name}",
    )
    for key, text, unquoted in (
        ("init", config_file.name, _UNSAFE_IN_NAME),
        ("output_dir", output_dir, _UNSAFE_IN_NAME),
        ("--install", install or "", _UNSAFE_IN_PACKAGE),
    ):
        unsafe_match = unquoted.search(text)
        require(
            unsafe_match is None,
            f"{key}: {text}: contains {unsafe_match and unsafe_match[0]!r}, which is not safe in the "
            "generated file; remove or replace this character",
        )


def write_launch_file(
    folder: Traversable,
    target: str,
    config_file: Path,
    *,
    devices: Sequence[str],
    output_dir: str | None,
    install: str | None,
    spot: bool,
) -> Path:
    """Write the launch file of a program that rents machines, next to the config.

    Prints notes about settings that do not work well on such machines, for example local files.

    Args:
        folder: Folder ``configs/machines``.
        target: Value of ``--for``: a key of :func:`list_launch_templates`.
        config_file: The YAML file of the run.
        devices: Values of ``--device``, such as ``h100:8``. If there are several, the program
            chooses one.
        output_dir: Output folder of the run. None uses the value in the config.
        install: Argument of ``pip install`` on the machines. None installs this version from PyPI.
        spot: Whether to rent cheaper machines that may be preempted.

    Returns:
        Path of the file. For ``run.yaml`` and ``sky``, this is ``run.sky.yaml``.

    Raises:
        UserError: If the config does not exist, if the program does not offer such machines, if the
            run's output would be lost with the machine, or if the file already exists.
    """
    template = list_launch_templates(folder)[target]
    require(
        config_file.is_file(),
        f"init: {config_file}: does not exist; create the file with portable-train init",
    )
    overrides = {} if output_dir is None else {"output_dir": output_dir}
    config = load_config(config_file, overrides)
    machines = [_parse_machines(text, load_rental_device_names(), config, target) for text in devices]
    run_output_dir = str(config.output_dir)
    _check_can_launch(target, config_file, machines, run_output_dir, install)
    for key, local_path in () if target == "slurm" else _list_local_file_settings(config):
        print_status(
            f"note: {key}: {local_path} exists only on this machine; upload the files to a bucket or to "
            f"the hub, and change {key}"
        )
    if not config.saves_during_training:
        print_status(
            "note: checkpoint.every_steps: no checkpoint is saved during training, and not every machine "
            "gives a warning before it stops; set checkpoint.every_steps, for example to 500"
        )
    values = _build_template_values(target, config, config_file, machines, install, spot=spot)
    if install is None and target != "slurm":
        print_status(
            f"note: --install: pip can install portable-trainer {_VERSION} only after its release; until "
            "then, set --install to a URL"
        )
    out = config_file.with_suffix(f".{template.name}")
    conditions = {
        "several": machines[0].num_nodes > 1 and not machines[0].is_tpu,
        "mixed": len({kind.is_tpu for kind in machines}) > 1,
        "alike": len({kind.is_tpu for kind in machines}) == 1,
        "selected": bool(values["selector"]),
    }
    text = fill_template(template.read_text("utf-8"), values | {"file": out.name}, conditions)
    write_new_file(out, text, "remove the file first")
    return out


def write_new_file(path: Path, text: str, remedy: str) -> None:
    """Write a new file. Does not overwrite an existing file.

    Args:
        path: Path of the file.
        text: Content of the file.
        remedy: End of the error message if the file already exists.

    Raises:
        UserError: If the file already exists or cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UserError(f"init: {path} already exists; {remedy}") from error
    except OSError as error:
        raise UserError(
            f"init: {path}: cannot be written ({error.strerror or error}); use another path"
        ) from error


def fill_template(text: str, values: Mapping[str, str], conditions: Mapping[str, bool]) -> str:
    """Fill in the placeholders of a template, and drop the lines whose condition is false.

    Args:
        text: The template.
        values: Values of the placeholders, keyed by name.
        conditions: Whether each of :data:`_LINE_CONDITIONS` is true, keyed by name.

    Returns:
        The text of the template after these changes.
    """
    lines = []
    for line in text.splitlines():
        condition = re.match(f"@({'|'.join(_LINE_CONDITIONS)})@", line)
        if condition is None:
            lines.append(line)
        elif conditions[condition[1]]:
            lines.append(line[condition.end() :])
    return _PLACEHOLDER.sub(lambda match: values[match[1]], "\n".join(lines) + "\n")


def _parse_machines(
    text: str, rental_table: Mapping[str, Any], config: RunConfig, target: str
) -> RentedMachines:
    """Parse the value of ``--device``, and check that the ``--for`` target supports these devices.

    Args:
        text: Value of ``--device``, such as ``h100:8``.
        rental_table: Content of ``configs/machines/names.yaml``.
        config: Config of the run.
        target: Value of ``--for``: the program or service that launches the run, such as
            ``hf-jobs``.

    Raises:
        UserError: If the backend or the target does not support the device or the number of
            devices.
    """
    device, count = parse_devices(text)
    key = {"a100": "a100-80", "v100": "v100-16"}.get(device.name, device.name)
    machines = RentedMachines(device, count, rental_table.get(key, {}))
    require(
        config.backend == "auto" or config.backend in device.backends,
        f"--device: {text}: backend {config.backend} does not support this device; set backend: auto",
    )
    if not machines.is_tpu:
        require(target != "cloud-tpu", f"--device: {text} is not a TPU; specify a TPU, such as v5e:8")
        spans_nodes = machines.num_devices > device.devices_per_node
        require(
            not (spans_nodes and machines.num_devices % device.devices_per_node),
            f"--device: {text}: a machine has {device.devices_per_node} devices; use a multiple of "
            f"{device.devices_per_node}",
        )
        require(
            target != "hf-jobs" or machines.num_devices in machines.rental_names.get("hf", {}),
            f"--device: {text}: Hugging Face Jobs has no such machine; use h200:8, a100-80:8 or l4:4",
        )
        return machines
    topologies = rental_table["topologies"][3 if "cores" in machines.rental_names else 2]
    require(
        "type" in machines.rental_names and target not in _GPU_ONLY_PROGRAMS,
        f"--device: {text} is not available with --for {target}; choose another device",
    )
    require(
        machines.num_devices in topologies,
        f"--device: {text}: no TPU slice has this number of chips; use one of "
        f"{', '.join(map(str, topologies))}",
    )
    require(
        machines.num_nodes == 1 or target == "cloud-tpu" or (target == "jobset" and config.backend != "tpu"),
        f"--device: {text}: --for {target} with backend: {config.backend} does not support slices of several "
        "hosts; use --for cloud-tpu, or --for jobset with backend: xla",
    )
    labels = {
        "cloud.google.com/gke-tpu-accelerator": machines.rental_names["gke"],
        "cloud.google.com/gke-tpu-topology": topologies[machines.num_devices],
    }
    return RentedMachines(device, machines.num_devices, {**machines.rental_names, "labels": labels})


def _list_local_file_settings(config: RunConfig) -> list[LocalFileSetting]:
    """List the settings whose value is an existing local file or folder.

    The sources of training and evaluation data are also checked. A glob counts if it matches a file
    or folder, and a list counts if one of its items exists.
    """
    values = {
        setting.key: config.get(setting.key)
        for setting in keys.get_setting_fields(RunConfig).values()
        if setting.may_be_path
    }
    values |= {
        f"{format_training_source_key(name)}.source": source.source
        for name, source in get_training_sources(config.data).items()
    }
    values |= {
        f"{format_eval_source_key(name)}.source": source.source
        for name, source in get_evaluation_sources(config.data).items()
    }
    local_files: list[LocalFileSetting] = []
    for key, value in values.items():
        names = value if isinstance(value, list | tuple) else (value,)
        texts = (name for name in names if isinstance(name, str) and not is_url(name))
        # Use os.path, because pathlib raises OSError for a name that is too long.
        if any(os.path.exists(text) or any(iglob(text)) for text in texts):  # noqa: PTH110, PTH207
            local_files.append(LocalFileSetting(key, value))
    return local_files


def _format_requirement(config: RunConfig, install: str | None, *, tpu: bool) -> str:
    """Format the argument of ``pip install``, including the extras that the run needs.

    Args:
        config: Config of the run.
        install: Value of ``--install``. Extras are added to a URL; other values are returned unchanged.
            None installs this version from PyPI.
        tpu: Whether the machines have TPUs.
    """
    if install is not None and not re.match(r"[\w+.-]+://", install):
        return install
    scheme = str(config.output_dir).partition("://")[0]
    extras = [{"s3": "s3", "gs": "gcs"}.get(scheme, "azure")] if is_url(str(config.output_dir)) else []
    if tpu:
        extras.append("torchtpu" if config.backend == "tpu" else "tpu")
    elif config.strategy.startswith("zero"):
        extras.append("deepspeed")
    if config.adapter.base in ("nf4", "int8") and not tpu:
        extras.append("qlora")
    if config.data.images:
        extras.append("images")
    requirement = f"portable-trainer[{','.join(extras)}]"
    return f"{requirement}=={_VERSION}" if install is None else f"{requirement} @ {install}"


def _build_template_values(
    target: str,
    config: RunConfig,
    config_file: Path,
    machines: Sequence[RentedMachines],
    install: str | None,
    *,
    spot: bool,
) -> dict[str, str]:
    """Build the values for the placeholders in the launch templates, keyed by placeholder name.

    The templates are files in ``configs/machines``. The result contains the placeholders of all
    templates except ``file``, and each template uses only some of them.

    Args:
        target: Value of ``--for``: the program that rents the machines or starts the run on them,
            such as ``sky``.
        config: Config of the run.
        config_file: The YAML file of the run.
        machines: Machines to rent, one entry per ``--device``.
        install: Value of ``--install``, or None.
        spot: Whether to rent machines that may be preempted.

    Raises:
        UserError: If ``machines`` has several entries although ``target`` supports only one, or if
            the entries have different numbers of machines.
    """
    first = machines[0]
    require(
        len(machines) == 1 or target in _MULTI_DEVICE_PROGRAMS,
        f"--device: --for {target} supports only one kind of machine; specify --device once",
    )
    require(
        len({kind.num_nodes for kind in machines}) == 1,
        "--device: the devices need different numbers of machines ("
        + ", ".join(f"{kind.device.name}:{kind.num_devices} on {kind.num_nodes}" for kind in machines)
        + "); choose numbers of devices that need the same number of machines",
    )
    output_dir = str(config.output_dir)
    secrets = ("HF_TOKEN", *_BUCKET_SECRETS.get(output_dir.partition("://")[0], ()))
    packages = {tpu: _format_requirement(config, install, tpu=tpu) for tpu in (False, True)}
    config_indent, label_indent = _TEMPLATE_INDENTS.get(target, (0, 0))
    # Escape dollar signs, because Kubernetes replaces $(NAME) and reads $$ as $.
    text = config_file.read_text("utf-8").replace("$", "$$").removesuffix("\n").split("\n")
    cloud_script = Path(portable.__file__).parent / "tpu" / "scripts" / "cloud.sh"
    return {
        "name": re.sub("[^a-z0-9]+", "-", config_file.stem.lower()).strip("-")[:40] or "run",
        "config": config_file.name,
        "output": output_dir,
        "nodes": str(first.num_nodes),
        "each": str(first.num_devices // first.num_nodes),
        "command": "portable-train" if first.is_tpu or first.num_nodes == 1 else "torchrun -m portable.cli",
        "package": packages[first.is_tpu],
        "gpu_package": packages[False],
        "tpu_package": packages[True],
        "spot": str(spot).lower(),
        "spot_flag": " --spot" if spot else "",
        "policy": "spot" if spot else "on-demand",
        "accelerators": "\n".join(_format_skypilot_resources(machines)) if target == "sky" else "",
        "names": ", ".join(dict.fromkeys(kind.get_device_name("dstack") for kind in machines)),
        "memory": str(min(kind.device.memory_bytes for kind in machines) >> 30),
        "flavor": str(first.rental_names.get("hf", {}).get(first.num_devices)),
        "secrets": _format_secret_flags(target, secrets),
        "secret_env": "\n".join(
            f"      - name: {name}\n        valueFrom: "
            f"{{secretKeyRef: {{name: portable-trainer, key: {name}, optional: true}}}}"
            for name in secrets
        ),
        "environment": "\n".join(f"  - {name}" for name in secrets),
        "selector": "\n".join(
            " " * label_indent + f"{key}: {value}"
            for key, value in first.rental_names.get("labels", {}).items()
        ),
        "resource": "google.com/tpu" if first.is_tpu else "nvidia.com/gpu",
        "tpu_type": first.accelerator_type if first.is_tpu else "",
        "backend": "tpu" if config.backend == "tpu" else "xla",
        "cloud": shlex.quote(str(cloud_script)),
        "text": "\n".join(" " * config_indent + line for line in text),
    }


def _format_secret_flags(target: str, names: Sequence[str]) -> str:
    """Format the flags of a launch command that pass environment variables to rented machines.

    The variables contain credentials. For SkyPilot, the result is a single line. For other
    programs, each flag is on its own line, which ends with a backslash.

    Args:
        target: Value of ``--for``.
        names: Names of the environment variables.
    """
    if target == "sky":
        return "".join(f" --secret {name}" for name in names)
    return "\n".join(f"  --secrets {name} \\" for name in names)[:-2] + " \\"


def _format_skypilot_resources(machines: Iterable[RentedMachines]) -> list[str]:
    """Format the YAML lines of a SkyPilot file that list the acceptable machines."""
    lines = []
    for kind in machines:
        if kind.is_tpu:
            lines.append(f"    - accelerators: tpu-{kind.accelerator_type}")
            version = kind.rental_names.get("runtime", "tpu-ubuntu2204-base")
            lines.append(f"      accelerator_args: {{runtime_version: {version}}}")
        else:
            lines.append(
                f"    - accelerators: {kind.get_device_name('sky')}:{kind.num_devices // kind.num_nodes}"
            )
    return lines
