"""What is written to the Hugging Face Hub: a finished folder of this machine, in one commit, to the
branch that the URL names or to a pull request of its own.

The commit is made on the tip that was there when the run began, and the Hub refuses it if that has
moved meanwhile. Uploads, and in what form, are the library's business.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final, NamedTuple

from ...core.errors import MigrateError, fail, printable
from ..urls import split_url
from .hub import asking, split_names
from .objects import refuse_without

# what loads as a model, and what would be one beside the output that replaces it
_WEIGHTS: Final = re.compile(
    r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?"
)
_FORM: Final = "hf://ORG/MODEL for a pull request, or hf://ORG/MODEL@BRANCH"


class HubCommitted(NamedTuple):
    """Where an output went, and what else there is to say of it."""

    location: str
    notes: tuple[str, ...]


class HubOutput:
    """A repository as the place of an output. M115, M917, M967 to M969."""

    def __init__(self, text: str) -> None:
        url = split_url(text)
        self.shown = url.shown
        try:
            import huggingface_hub as hub
        except ImportError:
            refuse_without("huggingface_hub", "hub", self.shown)
        self._kind, self.repo, self.branch, path = split_names(url)
        if path:
            fail(
                "M115",
                f"{printable(self.shown, 240)}: names a file or folder of a repository, and an "
                "output is the whole",
                help=_FORM,
            )
        self._hub, self._api = hub, hub.HfApi()
        if self.branch is not None and re.fullmatch("[0-9a-f]{40}", self.branch):
            fail(
                "M115",
                f"{printable(self.shown, 240)}: names a commit, and nothing can be added to it",
                help=_FORM,
            )
        with asking(self.shown):
            found = self._api.repo_info(self.repo, repo_type=self._kind)
        if found.id != self.repo:
            fail(
                "M917",
                f"{printable(self.shown, 240)}: is called {printable(found.id)} now",
                help=f"give hf://{printable(found.id)}",
            )
        # None where there is no such branch yet
        self._tip: str | None = found.sha
        if self.branch is not None:
            try:
                with asking(self.shown):
                    self._tip = self._api.repo_info(
                        self.repo, repo_type=self._kind, revision=self.branch
                    ).sha
            except MigrateError as error:
                if error.diagnostics[0].code != "M917":
                    raise
                self._tip = None

    @property
    def name(self) -> str:
        return self.repo.partition("/")[2]

    def commit(self, folder: str, message: str) -> HubCommitted:
        """Has the folder committed. M905 if the branch has another tip by now."""
        names = sorted(
            os.path.relpath(os.path.join(above, name), folder)
            for above, _, there in os.walk(folder)
            for name in there
        )
        hub, of = self._hub, {"repo_type": self._kind}
        with asking(self.shown):
            if self._tip is None:
                self._api.create_branch(self.repo, branch=self.branch, **of)
                self._tip = self._api.repo_info(self.repo, revision=self.branch, **of).sha
            tree = self._api.list_repo_tree(self.repo, revision=self._tip, **of)
            gone = sorted(
                one.path for one in tree if _WEIGHTS.fullmatch(one.path) and one.path not in names
            )
            work: list[Any] = [
                hub.CommitOperationAdd(
                    path_in_repo=name, path_or_fileobj=os.path.join(folder, name)
                )
                for name in names
            ]
            work += [hub.CommitOperationDelete(path_in_repo=name) for name in gone]
            try:
                made = self._api.create_commit(
                    self.repo,
                    work,
                    commit_message=message,
                    revision=self.branch,
                    create_pr=self.branch is None,
                    parent_commit=self._tip,
                    **of,
                )
            except hub.errors.HfHubHTTPError as error:
                if error.response is not None and error.response.status_code in (409, 412):
                    fail(
                        "M905",
                        f"{printable(self.shown, 240)}: the branch was at {self._tip} when the run "
                        "began, and has moved",
                        help="look at what was committed meanwhile",
                    )
                raise
            except (RuntimeError, ValueError) as error:
                # of the thread that uploads; its words hold URLs
                status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
                fail(
                    "M969",
                    f"{printable(self.shown, 240)}: the upload failed "
                    f"({f'status {status}' if status else type(error).__name__})",
                    help="run it again later",
                )
        kind = "" if self._kind == "model" else f"{self._kind}s/"
        notes = []
        if made.pr_url:
            notes.append(f"committed to a pull request: {printable(made.pr_url, 240)}")
        if gone:
            listed = ", ".join(map(printable, gone[:5])) + ", …" * (len(gone) > 5)
            notes.append(f"weights that the repository had are removed by the commit: {listed}")
        return HubCommitted(f"hf://{kind}{self.repo}@{made.oid}/", tuple(notes))
