"""Find the credentials, endpoint, and region for opening an object store.

obstore itself reads most environment variables of each vendor and the role of a cloud machine. This
module reads the other variables, such as `AZURE_STORAGE_CONNECTION_STRING` and `AWS_CA_BUNDLE`.
obstore does not read the profiles and single sign-on in `~/.aws`, federated Google accounts, a
login to Azure, or a token for the Hugging Face Hub. For these, this module uses the vendor's Python
package, which it imports only when necessary.
"""

from __future__ import annotations

import json
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from portable.converters.storage.store_errors import AccessDeniedError, RemoteError, format_store_error

SEARCHED_CREDENTIALS = {
    "s3": "looked for AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws and a role of this container or machine",
    "gs": (
        "looked for GOOGLE_APPLICATION_CREDENTIALS, credentials from gcloud auth application-default "
        "login, and a role of this machine"
    ),
    "az": (
        "looked for AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN, "
        "AZURE_CLIENT_ID, credentials from az login, and a role of this machine"
    ),
    "hf": "looked for HF_TOKEN and a token from hf auth login",
}
"""Description of the credentials that are tried for each protocol, used in error messages."""
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_METADATA_HOSTS = {"s3": "169.254.169.254", "gs": "metadata.google.internal"}


def _get_first_env(*names: str) -> str:
    """Return the value of the first environment variable that is set and not empty, or `""`."""
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _is_env_enabled(name: str) -> bool:
    """Return whether an environment variable is set to `1`, `true`, `yes`, or `on`, ignoring case."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def _build_s3_options(bucket: str) -> dict[str, Any]:
    """Return the arguments for opening a bucket in S3 or a compatible store.

    The first available source provides the credentials:

    1. Environment variables with access keys. obstore reads them itself.
    2. Environment variables with a web identity token, or the address of a container's credentials.
       obstore reads them itself. They are ignored if `AWS_PROFILE` is set.
    3. boto3, if it is installed. It also provides the region and the endpoint if they are not set.
       The next source is then not used, because boto3 also finds the role of the machine.
    4. The role that is attached to the cloud machine. obstore requests its credentials. This source
       is not used if `AWS_EC2_METADATA_DISABLED` is enabled.

    No credentials are needed if `AWS_SKIP_SIGNATURE` is enabled. If neither a region nor an
    endpoint is set, the bucket's region is requested from S3. `AWS_CA_BUNDLE` is the path of a file
    with root certificates.

    Raises:
        RemoteError: If there are no credentials, or if `AWS_PROFILE` is set and boto3 is not
            installed.
        OSError: If the file in `AWS_CA_BUNDLE` cannot be read.
    """
    options: dict[str, Any] = {}
    endpoint = _get_first_env("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    region = _get_first_env("AWS_REGION", "AWS_DEFAULT_REGION")
    keys = _get_first_env("AWS_ACCESS_KEY_ID") and _get_first_env("AWS_SECRET_ACCESS_KEY")
    role = not _get_first_env("AWS_PROFILE") and _get_first_env(
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    if keys or role or _is_env_enabled("AWS_SKIP_SIGNATURE"):
        pass  # obstore reads these itself.
    elif _get_first_env("AWS_PROFILE") or _is_installed("boto3"):
        session = _create_from_vendor_package("boto3", "Session", "s3")
        provider = _create_from_vendor_package("obstore.auth.boto3", "Boto3CredentialProvider", "s3", session)
        options["credential_provider"] = provider
        client = session.client("s3")
        region = region or session.region_name or ""
        if not endpoint and "amazonaws.com" not in client.meta.endpoint_url:
            endpoint = options["endpoint"] = client.meta.endpoint_url
    elif _is_env_enabled("AWS_EC2_METADATA_DISABLED") or not _is_metadata_host_reachable("s3"):
        raise _build_missing_credentials_error("s3")
    if not region and not endpoint:
        region = _fetch_bucket_region(bucket)
    if region:
        options["region"] = region
    if certificates := _get_first_env("AWS_CA_BUNDLE"):
        options["client_options"] = {"root_certificate": Path(certificates).read_bytes()}
    return options


@cache
def _fetch_bucket_region(bucket: str) -> str:
    """Request the region of an S3 bucket from Amazon. This does not require credentials.

    Returns:
        The region, or an empty string if there is no response or the response does not contain it.
    """
    import urllib.error  # Imported here because the import is slow.
    import urllib.request

    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:  # 403 and redirects also have the header.
        headers = error.headers
    except OSError:
        return ""
    return str(headers.get("x-amz-bucket-region") or "")


def _build_gcs_options(bucket: str) -> dict[str, Any]:
    """Return the arguments for opening a bucket in Google Cloud Storage.

    obstore itself reads service accounts and tokens from environment variables. If none are set,
    the credentials come from the file in `GOOGLE_APPLICATION_CREDENTIALS`, or from the file that
    the gcloud command stores. Without such a file, obstore uses the service account of the cloud
    machine. No credentials are needed if `STORAGE_EMULATOR_HOST` is set or `GOOGLE_SKIP_SIGNATURE`
    is enabled.

    Raises:
        RemoteError: If there are no credentials, or if the file does not contain valid credentials.
    """
    if emulator := _get_first_env("STORAGE_EMULATOR_HOST"):
        base = emulator if "://" in emulator else f"http://{emulator}"
        return {"base_url": base.rstrip("/"), "skip_signature": True}
    key_variables = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY")
    if _is_env_enabled("GOOGLE_SKIP_SIGNATURE") or _get_first_env(*key_variables, "GOOGLE_BEARER_TOKEN"):
        return {}
    folder = Path(_get_first_env("CLOUDSDK_CONFIG") or "~/.config/gcloud").expanduser()
    configured_path = _get_first_env("GOOGLE_APPLICATION_CREDENTIALS")
    file = (
        Path(configured_path).expanduser()
        if configured_path
        else folder / "application_default_credentials.json"
    )
    if configured_path or file.is_file():
        try:
            kind = json.loads(file.read_bytes())["type"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise AccessDeniedError(
                f"{file}: does not contain Google credentials ({type(error).__name__}); set "
                "GOOGLE_APPLICATION_CREDENTIALS to a file with credentials"
            ) from None
        if kind in ("authorized_user", "service_account"):
            return {"application_credentials": str(file)}
        return {
            "credential_provider": _create_from_vendor_package(
                "obstore.auth.google", "GoogleCredentialProvider", "gs"
            )
        }
    if not _is_metadata_host_reachable("gs"):
        raise _build_missing_credentials_error("gs")
    return {}


def _build_azure_options(bucket: str) -> dict[str, Any]:
    """Return the arguments for opening a container in Azure.

    If the environment does not contain a key, a token, or other credentials, the package
    `azure-identity` provides them. It finds, for example, the credentials of `az login`. No
    credentials are needed if `AZURE_STORAGE_USE_EMULATOR` or `AZURE_SKIP_SIGNATURE` is enabled. The
    fields of `AZURE_STORAGE_CONNECTION_STRING` take precedence over other variables. A storage account
    in the URL takes precedence over both. The emulator uses neither.

    Args:
        bucket: Name of the container, possibly followed by `@` and the host of the storage account.

    Raises:
        RemoteError: If the name of the storage account is unknown, or if credentials are missing.
    """
    pairs = [part.partition("=") for part in _get_first_env("AZURE_STORAGE_CONNECTION_STRING").split(";")]
    connection_fields = {name: value for name, _, value in pairs}
    account = connection_fields.get("AccountName") or _get_first_env(
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"
    )
    in_url = "@" in bucket  # The URL has the form abfss://container@account.dfs...
    names = {
        "account_name": "" if in_url else account,
        "endpoint": connection_fields.get("BlobEndpoint", ""),
        "account_key": connection_fields.get("AccountKey")
        or _get_first_env("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
        "sas_key": connection_fields.get("SharedAccessSignature")
        or _get_first_env("AZURE_STORAGE_SAS_TOKEN"),
    }
    options: dict[str, Any] = {name: value for name, value in names.items() if value}
    if _is_env_enabled("AZURE_STORAGE_USE_EMULATOR"):
        return {}
    if not (account or in_url):
        raise RemoteError(
            "the name of the storage account is not set; set AZURE_STORAGE_ACCOUNT_NAME to the name"
        )
    native = _get_first_env("AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_TOKEN")
    login = _get_first_env("AZURE_CLIENT_SECRET", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE")
    if not (
        {"account_key", "sas_key"} & options.keys()
        or native
        or login
        or _is_env_enabled("AZURE_SKIP_SIGNATURE")
    ):
        provider = _create_from_vendor_package("obstore.auth.azure", "AzureCredentialProvider", "az")
        options["credential_provider"] = provider
    return options


def _build_hub_options(repository: str) -> dict[str, Any]:
    """Return the arguments for reading a repository on the Hugging Face Hub at one revision.

    The token of huggingface_hub (`HF_TOKEN` or a login) is used if it exists.

    Args:
        repository: Name of the repository, with an optional revision:
            `datasets/owner/name@revision`. The default revision is `main`.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    name, _, revision = repository.partition("@")
    headers = {key: value for key, value in build_hf_headers().items() if key.lower() == "authorization"}
    url = f"{constants.ENDPOINT}/{name}/resolve/{quote(revision or 'main', safe='')}"
    return {"url": url, "client_options": {"default_headers": headers}}


OPTION_BUILDERS = {
    "s3": _build_s3_options,
    "gs": _build_gcs_options,
    "az": _build_azure_options,
    "hf": _build_hub_options,
}
"""Functions that build the arguments for `obstore.store.from_url`, keyed by protocol.

Each function takes the name of a bucket. If there are no credentials, or if the package that reads
them is not installed, it raises a RemoteError whose message does not contain the URL.
"""


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def _create_from_vendor_package(module: str, name: str, protocol: str, *args: Any) -> Any:
    """Import a class from a vendor's package, such as a credential provider, and create an instance.

    Args:
        module: Module that contains the class.
        name: Name of the class.
        protocol: Protocol of the store, used in error messages.
        args: Arguments of the class.

    Raises:
        RemoteError: If the package is not installed.
        AccessDeniedError: If the package raises an error.
    """
    from importlib import import_module

    try:
        return getattr(import_module(module), name)(*args)
    except ImportError:
        raise RemoteError(
            "these credentials need a package that is not installed; run: pip install "
            f"'portable-trainer[{_EXTRAS[protocol]}]'"
        ) from None
    except Exception as error:  # Each package has its own exceptions.
        raise _build_missing_credentials_error(protocol, format_store_error(error)) from None


def _build_missing_credentials_error(protocol: str, reason: str = "") -> AccessDeniedError:
    because = f": {reason}" if reason else ""
    return AccessDeniedError(
        f"no credentials found ({SEARCHED_CREDENTIALS[protocol]}){because}; set up one of these credentials"
    )


def _is_metadata_host_reachable(protocol: str) -> bool:
    """Return whether the metadata server of a cloud machine responds within one second.

    This server provides the credentials of the machine's role. Without this check, obstore would
    retry for minutes on machines without such a server.

    Args:
        protocol: Protocol of the cloud's object store: `s3` or `gs`.
    """
    try:
        socket.create_connection((_METADATA_HOSTS[protocol], 80), timeout=1).close()
    except OSError:
        return False
    return True
