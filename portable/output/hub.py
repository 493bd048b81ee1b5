"""Upload the export of a run to a model repository on the Hugging Face Hub (section ``hub``)."""

from __future__ import annotations

import shlex
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from portable.errors import RunError, UserError, to_one_line
from portable.output.export import EXPORT_MARKER_FILE
from portable.paths import parse_place_setting
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from portable.config import RunConfig

RETRY_WAIT_SECONDS = (10.0, 60.0)
"""Seconds between the attempts of an upload. In each attempt, huggingface_hub also retries most requests."""
_UPLOAD_TIMEOUT_SECONDS = 300.0  # seconds until a request fails, because huggingface_hub has no limit
_START_TIMEOUT_SECONDS = 30.0
_RETRIED_STATUS_CODES = (408, 409, 425, 429)
_TOKEN_HINT = "set HF_TOKEN to a token with write access, or log in with: hf auth login"


class HubRepository:
    """Model repository to which a run uploads its export.

    The name of the repository is ``hub.repo``. If this setting is null, the name is the last part
    of ``output_dir``. The constructor does not access the Hub.

    Args:
        config: Config of the run, which must set ``hub.push``.

    Raises:
        UserError: If the name of the repository is invalid.
    """

    def __init__(self, config: RunConfig) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        repo = config.hub.repo
        self.name = repo or parse_place_setting("output_dir", config.output_dir).name
        """Name of the repository. If it has no owner, the first request adds the user of the token."""
        self._private = config.hub.private
        self._created = False
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            reason = to_one_line(error).rstrip(".")
            if repo:
                raise UserError(
                    f"hub.repo: {repo!r} is not a valid repository name ({reason}); use a name such as "
                    "OWNER/NAME"
                ) from error
            raise UserError(
                "hub.repo: is not set, and the last part of output_dir is not a valid repository name "
                f"({reason}); set hub.repo to a name such as OWNER/NAME"
            ) from error

    def check_access(self) -> None:
        """Check the token, the name and the permissions before a run, without changing anything on the hub.

        If the hub does not respond, only a warning is printed, because the run can still train and upload
        later.

        Raises:
            UserError: If the run could not upload its export.
        """
        from huggingface_hub import HfApi, constants

        if constants.HF_HUB_OFFLINE:
            raise UserError("hub.push: HF_HUB_OFFLINE is set; unset HF_HUB_OFFLINE, or set hub.push to null")
        if (
            error := self._find_connection_error(partial(self._check_repository_access, HfApi()))
        ) is not None:
            print_status(
                f"warning: hub.push: the hub does not respond ({_format_reason(error)}); the run "
                "continues, and tries to connect again before an upload"
            )

    def create_repository(self) -> None:
        """Create the repository, if it does not exist.

        If the Hub does not respond, this method does nothing, and the upload creates the
        repository later.

        Raises:
            UserError: If the run could not upload its export, for example because no token with
                write access is available, or if the Hub rejects a request.
        """
        self._find_connection_error(self._create_repository_once)

    def push_export(self, folder: Path, message: str) -> str:
        """Upload an export as a commit, and return the URL of the repository.

        The repository is created if it does not exist. Other files in the repository are kept. The
        marker ``.export.json`` is not uploaded. A failed upload is retried twice, after the pauses
        in :data:`RETRY_WAIT_SECONDS`.

        Args:
            folder: Folder of the export.
            message: Commit message.

        Returns:
            The URL of the repository.

        Raises:
            RunError: If the last attempt failed. There is no retry if the Hub rejected a request,
                or if the check of the token and the repository failed.
        """
        from huggingface_hub import HfApi

        for wait in (*RETRY_WAIT_SECONDS, None):
            try:
                with _limit_request_seconds(_UPLOAD_TIMEOUT_SECONDS), _disable_hub_progress_bars():
                    self._create_repository_once()
                    HfApi().upload_folder(
                        repo_id=self.name,
                        folder_path=folder,
                        commit_message=message,
                        ignore_patterns=[EXPORT_MARKER_FILE],
                    )
                return f"{HfApi().endpoint}/{self.name}"
            except Exception as error:
                if wait is None or self._build_user_error(error) is not None:
                    raise RunError(_format_reason(error)) from error
            time.sleep(wait)
        raise AssertionError

    def format_upload_command(self, folder: object) -> str:
        """Format the shell command that uploads an export.

        Args:
            folder: Folder or URL of the export.
        """
        private = " --private" if self._private else ""
        return f"hf upload {self.name} {shlex.quote(str(folder))} . --exclude {EXPORT_MARKER_FILE}{private}"

    def _find_connection_error(self, action: Callable[[], None]) -> Exception | None:
        """Run an action on the Hub, and return the error if there was a connection problem.

        Each request of the action has a time limit.

        Args:
            action: Function that sends requests to the Hub.

        Returns:
            The error, which may also be a temporary error of the Hub or an unexpected exception.
            None if the action succeeded.

        Raises:
            UserError: If the Hub rejected a request, or if the action raised a UserError.
        """
        try:
            with _limit_request_seconds(_START_TIMEOUT_SECONDS):
                action()
        except Exception as error:
            if (refused := self._build_user_error(error)) is not None:
                raise refused from error
            return error
        return None

    def _check_repository_access(self, api: Any) -> None:
        """Check the token and its permissions, and complete the repository name.

        A name without an owner is prefixed with the token's user.

        Args:
            api: ``HfApi`` object.

        Raises:
            UserError: If there is no token or the token is read-only, if the repository does not
                exist and the user cannot create it, or if the repository is public although
                ``hub.private`` is set.
            Exception: If a request fails, for example because the token has no write access to an
                existing repository. :meth:`_build_user_error` converts these exceptions.
        """
        from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError

        try:
            user = api.whoami()
        except LocalTokenNotFoundError as error:
            raise UserError(f"hub.push: there is no Hugging Face token; {_TOKEN_HINT}") from error
        if ((user.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
            raise UserError(f"hub.push: the token has only read access; {_TOKEN_HINT}")
        if "/" not in self.name:
            self.name = f"{user['name']}/{self.name}"
        try:
            info = api.model_info(self.name)
        except RepositoryNotFoundError:
            owner = self.name.partition("/")[0]
            if owner not in (user["name"], *(org["name"] for org in user.get("orgs") or [])):
                raise UserError(
                    f"hub.repo: {self.name} does not exist, and {user['name']}, the owner of the token, "
                    f"cannot create repositories under {owner}; check the name, or {_TOKEN_HINT}"
                ) from None
            return
        if self._private and not info.private:
            raise UserError(
                f"hub.private: {self.name} exists and is public; set hub.private to false, or name another "
                "repository in hub.repo"
            )
        api.auth_check(self.name, write=True)

    def _create_repository_once(self) -> None:
        """Check that the token can write to the Hub repository, and create it if it does not exist.

        If an earlier call has succeeded, this method does nothing.
        """
        from huggingface_hub import HfApi

        if self._created:
            return
        api = HfApi()
        self._check_repository_access(api)
        api.create_repo(self.name, private=self._private, exist_ok=True)
        self._created = True

    def _build_user_error(self, error: Exception) -> UserError | None:
        """Convert an exception to an error that suggests a remedy to the user.

        A UserError is returned unchanged. Returns None for a temporary error of the Hub, because
        a retry may help. Also returns None for all other exceptions that are not from the Hub,
        such as connection errors.
        """
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

        if isinstance(error, UserError):
            return error
        if isinstance(error, RepositoryNotFoundError):
            return UserError(
                f"hub.repo: {self.name} does not exist, or the token has no access to the repository; "
                f"{_TOKEN_HINT}"
            )
        if not isinstance(error, HfHubHTTPError):
            return None
        status = error.response.status_code
        if status >= 500 or status in _RETRIED_STATUS_CODES:
            return None
        if status == 401:
            return UserError(f"hub.push: the hub does not accept the token; {_TOKEN_HINT}")
        if status == 403:
            return UserError(f"hub.repo: the token has no write access to {self.name}; {_TOKEN_HINT}")
        return UserError(
            f"hub.push: the hub refuses the request for {self.name} ({_format_reason(error)}); check "
            "hub.repo and the token"
        )


def _format_reason(error: BaseException) -> str:
    """Format the cause of an error as one line of at most 300 characters."""
    text = to_one_line(error)
    return text if len(text) <= 300 else text[:297] + "..."


@contextmanager
def _limit_request_seconds(seconds: float) -> Iterator[None]:
    """Set a timeout for requests to the Hub within this context, because huggingface_hub sets none.

    The timeout applies to all threads of the process, because they share the session of
    huggingface_hub.
    """
    from huggingface_hub.utils import get_session

    session = get_session()
    before, session.timeout = session.timeout, seconds
    try:
        yield
    finally:
        session.timeout = before


@contextmanager
def _disable_hub_progress_bars() -> Iterator[None]:
    """Disable huggingface_hub's progress bars within this context, because the run has its own bar."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()
