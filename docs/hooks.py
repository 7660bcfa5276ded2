"""MkDocs hooks: API pages from the package as it is, and links that lead out of docs/.

Pages are written for readers of the repository, so they link to source files (`../gspo_jax/config.py`) and to pages at
its top. On the site a link to a module becomes one to its API entry; a link to another file leads to `repo_url`, and
without one only its text is left. A narrow screen gets a figure's narrow variant, `NAME-narrow.png` beside `NAME.png`.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PACKAGE = "gspo_jax"
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
_IMAGE = re.compile(r'<img [^>]*src="([^"]+)\.png"[^>]*>')
_BLOCK = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def rooms() -> list[str]:
    """Names of the package's subpackages, then of its modules, in alphabetical order."""
    paths = sorted((ROOT / PACKAGE).iterdir())
    packages = [path.name for path in paths if (path / "__init__.py").exists()]
    return packages + [path.stem for path in paths if path.suffix == ".py" and path.stem != "__init__"]


def on_config(config: MkDocsConfig) -> None:
    """Append one API page per subpackage and module to the navigation."""
    assert config.nav is not None
    config.nav.append({"API": [{f"{PACKAGE}.{name}": f"api/{name}.md"} for name in rooms()]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the API pages, which mkdocstrings fills, and the pages from the repository's top."""
    for name in rooms():
        content = f"# {PACKAGE}.{name}\n\n::: {PACKAGE}.{name}\n    options:\n      show_root_heading: false\n"
        files.append(File.generated(config, f"api/{name}.md", content=content))
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for the site, outside of code blocks."""
    source = page.file.src_uri
    folder = posixpath.dirname(source if source in TOP_PAGES else f"docs/{source}")

    def rewrite(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, _, anchor = target.partition("#")
        if not path or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        on_site = path.removeprefix("docs/") if path.startswith("docs/") else path
        if files.get_file_from_path(on_site) and (path.startswith("docs/") or path in TOP_PAGES):
            relative = posixpath.relpath(on_site, posixpath.dirname(source) or ".")
            return f"{text}({relative}{'#' + anchor if anchor else ''})"
        if not (ROOT / path).exists():
            return match[0]  # for the build to report
        if path.startswith(f"{PACKAGE}/") and path.endswith(".py"):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            return f"{text}[{module}]"
        if config.repo_url:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{path})"
        return text[1:-1]

    return "".join(part if part.startswith("```") else _LINK.sub(rewrite, part) for part in _BLOCK.split(markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Offer the narrow variants of a page's figures to phones."""
    del config
    there = {file.url for file in files}

    def offer(match: re.Match[str]) -> str:
        narrow = f"{match[1]}-narrow.png"
        if posixpath.normpath(posixpath.join(posixpath.dirname(page.url), narrow)) not in there:
            return match[0]
        return f'<picture><source media="(max-width: 700px)" srcset="{narrow}">{match[0]}</picture>'

    return _IMAGE.sub(offer, html)
