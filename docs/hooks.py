"""What `make docs` adds to mkdocs: the findings and figures of `make figures`, and files to which its pages link."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).parent
ROOT = DOCS.parent
FIGURES = ROOT / "outputs" / "figures" / "README.md"
LINK = re.compile(r"\[([^][]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def place(target: Path) -> str:
    """Where the site has a file of the repository; code becomes a page."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    suffix = "" if target.suffix in (".md", ".png", ".ipynb") else ".md"
    return f"repository/{target.relative_to(ROOT).as_posix()}{suffix}"


def on_files(files, config):
    """Add the page of figures, the files outside docs/ to which pages link, and those to which these link."""
    pages = [ROOT / "README.md", FIGURES, *DOCS.rglob("*.md")]
    source = {"abs_src_path": str(FIGURES)}
    found = {FIGURES: File.generated(config, place(FIGURES), inclusion=InclusionLevel.NOT_IN_NAV, **source)}
    for page in pages:  # grows
        for _, path, _ in LINK.findall(page.read_text(encoding="utf-8")):
            target = (page.parent / path).resolve()
            if not target.is_file() or DOCS in target.parents or target in found:
                continue
            source = {"abs_src_path": str(target)}
            if place(target).endswith(f"{target.suffix}.md"):
                source = {"content": f"# {target.name}\n\n~~~~{target.suffix[1:]}\n{target.read_text('utf-8')}~~~~\n"}
            elif target.suffix == ".md":
                pages.append(target)
            found[target] = File.generated(config, place(target), inclusion=InclusionLevel.NOT_IN_NAV, **source)
    for file in found.values():
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Links lead to the site's places, links to folders become text, and a code block's file name its title."""
    source = Path(page.file.abs_src_path or DOCS / page.file.src_uri)

    def follow(match: re.Match) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_dir():
            return match[1]
        return f"[{match[1]}]({os.path.relpath(place(target), Path(page.file.src_uri).parent)}{match[3] or ''})"

    markdown = re.sub(r"^```yaml (\S+)$", r'```yaml title="\1"', markdown, flags=re.M)
    return markdown if page.file.abs_src_path is None else LINK.sub(follow, markdown)
