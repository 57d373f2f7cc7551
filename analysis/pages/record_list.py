"""The list of all records: what wrote each, from which commit; and links to them."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import pandas as pd
import yaml

ANALYSIS = Path(__file__).resolve().parents[1]


def described() -> dict[str, dict[str, str]]:
    """`records.yaml`: commands of records from before they had one, and commits that this history lacks."""
    return yaml.safe_load(Path(__file__).with_name("records.yaml").read_text(encoding="utf-8"))


def record_list(records: Mapping[str, dict[str, Any]]) -> pd.DataFrame:
    """One row per record, or per file or folder of many.

    Returns:
        columns `record`, `number`, `kind`, `finished` (the last day), `commits`, `changed` (how many were written with
        uncommitted changes) and `command`.
    """
    commands, groups = described()["commands"], {}
    for name, record in records.items():
        folder, below, _ = name.partition("/")
        groups.setdefault(f"{folder}/*" if below else name, []).append(record)
    rows = []
    for name, group in sorted(groups.items()):
        own = [record["command"] for record in group if "command" in record]
        known = [command for pattern, command in commands.items() if fnmatch(name, pattern)]
        commits = dict.fromkeys(str(record["environment"]["commit"])[:7] for record in group)
        rows.append(
            {
                "record": name,
                "number": len(group),
                "kind": ", ".join(dict.fromkeys(record["kind"] for record in group)),
                "finished": max(record["finished"] for record in group)[:10],
                "commits": next(iter(commits)) if len(commits) == 1 else f"{len(commits)} commits",
                "changed": sum(bool(record["environment"]["dirty"]) for record in group),
                "command": f"`{own[0] if len(group) == 1 and own else ([*known, ''])[0]}`",
            }
        )
    return pd.DataFrame(rows)


def link_to_record(name: str | None, folder: Path) -> str | None:
    """A Markdown link from a page in `folder` to a record, or to the file or folder of records that a pattern names."""
    if not isinstance(name, str):
        return name
    place = f"*/records/{name.partition('*')[0].rstrip('/')}"
    path = next((path for ends in ("", ".jsonl") for path in ANALYSIS.glob(place + ends)), None)
    target = "" if path is None else Path(os.path.relpath(path, folder)).as_posix()
    return f"[{PurePosixPath(name).name if '*' not in name else name}]({target})" if target else name
