"""Project files agree with the code and each other: version, CI, hooks, templates, links, navigation."""

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import gspo_jax

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*ROOT.glob("*.md"), *DOCS]
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def _prose(page: Path) -> str:
    """Return the page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub and MkDocs generate them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_version_has_one_source_and_is_cited():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "gspo_jax.__version__"}
    released = re.findall(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = _yaml("CITATION.cff")
    assert (citation["version"], str(citation["date-released"])) == released[0]
    assert gspo_jax.__version__ == released[0][0]


def test_types_are_packaged():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["gspo_jax"]
    assert (ROOT / "gspo_jax" / "py.typed").exists()


def test_ci_runs_what_contributors_run():
    commands = [step.get("run") for job in _yaml(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in commands and "bash launch/docs.sh" in commands


def test_hooks_run_checks_of_the_test_command():
    script = (ROOT / "launch" / "test.sh").read_text(encoding="utf-8")
    (repository,) = _yaml(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local" and len(repository["hooks"]) >= 4
    for hook in repository["hooks"]:
        tool = hook["entry"].split(" --")[0].removeprefix(".venv/bin/")
        assert hook["language"] == "system" and f"$bin/{tool}" in script


def test_actions_are_pinned_by_commit():
    """A tag can be moved to other code, which would run with the token of the workflow."""
    for file in (ROOT / ".github" / "workflows").glob("*.y*ml"):
        used = re.findall(r"uses: *(.*)", file.read_text(encoding="utf-8"))
        assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line) for line in used), used


@pytest.mark.parametrize("system", [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")], ids="-".join)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_has_one_version_in_the_constraints(python, system):
    """Of every extra, whatever the Python and system; the file names packages and versions, and no place of either."""
    lines = (ROOT / "launch" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"==[\w.]+", str(pin.specifier)) and not pin.url and not pin.extras for pin in pins)
    place = {"python_version": python, "python_full_version": f"{python}.9", "extra": ""}
    place |= {"sys_platform": system[0], "platform_machine": system[1], "platform_system": system[0].title()}
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(place)]
    versions = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}
    assert len(versions) == len(here), "two versions of one package"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name == "gspo-jax" or requirement.specifier.contains(versions[name]), requirement
    assert {"jaxlib", "libtpu", "tensorstore"} <= versions.keys()  # what these need is pinned too


def test_every_install_takes_the_constraints():
    """In scripts, notebooks and pages; what is not the project itself has versions of its own."""
    places = [*ROOT.glob("launch/*"), *ROOT.glob("examples/*.ipynb"), *ROOT.glob("docs/*.md")]
    for place in filter(Path.is_file, places):
        for line in place.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
            if re.search(r"pip install\b.*(-e |\{CODE\})", line):
                assert "launch/constraints.txt" in line, f"{place}: {line}"


@pytest.mark.parametrize("form", ["bug_report", "feature_request"])
def test_issue_forms_are_complete(form):
    """Every form has the fields and the unique ids without which GitHub ignores it."""
    content = _yaml(f".github/ISSUE_TEMPLATE/{form}.yml")
    fields = content["body"]
    assert content["name"] and content["description"] and len({field["id"] for field in fields}) == len(fields)
    assert all(
        field["type"] in {"textarea", "input", "checkboxes"} and field["attributes"]["label"] for field in fields
    )


@EACH_PAGE
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@EACH_PAGE
def test_modules_configs_and_scripts_in_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    for module in re.findall(r"-m (gspo_jax[\w.]*\w)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for file in re.findall(r"(?<![\w/])((?:configs|launch|tests)/\w+\.(?:py|sh))\b", text):
        assert (ROOT / file).exists() or "NAME" in file, file


def test_every_page_is_in_the_navigation():
    def files(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [file for child in (node.values() if isinstance(node, dict) else node) for file in files(child)]

    named = files(_yaml("mkdocs.yml")["nav"])
    pages = [str(page.relative_to(ROOT / "docs")) for page in DOCS]
    assert sorted(named) == sorted([*pages, "CHANGELOG.md", "CONTRIBUTING.md"])
