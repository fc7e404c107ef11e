"""Proves the import of every entry of transformers' conversion mapping, and writes the table of
docs/reference/transformers.md: `make imports`.

With names of entries it proves these alone, and writes nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from import_proof import prove
from tiny_models import entries

from migrate.core.errors import MigrateError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "transformers.md"
BEGIN, END = "<!-- made by make imports -->", "<!-- end -->"


def row(entry: str) -> str:
    """The row of one entry."""
    with TemporaryDirectory() as folder:
        try:
            proof = prove(entry, Path(folder))
        except LookupError as error:
            return _cells(entry, "", "no", str(error))
        except ImportError as error:
            name = error.name or re.search(r"requires the (\w+) library", str(error)).group(1)  # type: ignore[union-attr]
            return _cells(entry, "", "no", f"needs the package {name}")
        except (AssertionError, MigrateError) as error:
            found = str(error).splitlines()[0][:200]
            return _cells(entry, "", "not proven", re.sub(r"error\[M\d+\]: ", "", found))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir()
    rules = sum(not draft.keep for draft in proof.imported.drafts)
    said = f"{proof.tensors} tensors" + ("" if proof.back else "; some are dropped")
    return _cells(
        entry, proof.cls, "proven", f"{said}; {rules} rules" if rules != 1 else f"{said}; 1 rule"
    )


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(asked: list[str]) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    rows = []
    for entry in asked or entries():
        rows.append(row(entry))
        print(rows[-1], flush=True)
    if asked:
        return 0
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    proven = sum("| proven |" in line for line in rows)
    head = [
        BEGIN, "",
        f"transformers {transformers.__version__}: {proven} of {len(rows)} entries are proven.", "",
        "| entry | class | imported | what was compared, or why not |", "|---|---|---|---|",
    ]  # fmt: skip
    PAGE.write_text(before + "\n".join([*head, *rows, "", END]) + after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
