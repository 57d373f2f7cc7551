"""`--help` of an entry point: what it does, examples and groups, on one screen."""

import textwrap

import yaml

from .conf_files import CONF, entry_point, files_of

COLUMNS = 100
BY_RECIPE = ("schedule", "precision")  # groups that a recipe chooses


def help_text() -> str:
    """The help of this entry point, at most 40 lines, from the head of its file in `conf/`.

    That file begins with comments: one sentence, then the examples, indented.
    """
    text = (CONF / f"{entry_point()}.yaml").read_text(encoding="utf-8")
    head = [line[1:].removeprefix(" ") for line in text.split("\ndefaults:")[0].splitlines()]
    values = yaml.safe_load(text)
    groups = {}
    for entry in values["defaults"]:
        ((group, default),) = entry.items() if isinstance(entry, dict) else ((None, None),)
        if group is not None and not group.startswith("override "):
            groups[group] = [path.stem for path in files_of(group.partition("@")[0])], default
    note = ""
    if "recipe" in groups:
        groups |= {group: ([path.stem for path in files_of(group)], None) for group in BY_RECIPE}
        note = f"; the default recipe, the model's, chooses {' and '.join(BY_RECIPE)}"
    lines = [*head, "", f"groups (GROUP=CHOICE; [default]{note}):"]
    for group, (choices, default) in groups.items():
        shown = [f"[{choice}]" if choice == default else choice for choice in choices]
        lines += _wrapped(f"{group}: {', '.join(shown)}")
    keys = [key for key in values if key not in ("defaults", "hydra", *groups)]
    lines += ["", *_wrapped(f"keys: {', '.join(keys)}; keys of a group as GROUP.KEY=VALUE")]
    lines.append("  --cfg job prints all with their values, docs/reference/keys.md explains them; -m KEY=A,B runs both")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent="  ", subsequent_indent="    ")
