"""
What MkDocs does not do by itself when it builds the site from pages that also have to read well on GitHub.

- Pages and pictures from outside this folder (the figures of the benchmarks, the changelog) become part of the site,
  and links between them and the pages here, which are written as they are valid in the repository, are turned to them.
- Formulas, written as GitHub writes them, become MathML, which browsers draw without a script. One in several parts
  (divided by \\qquad) goes on in the next line where the window is narrow.
- The footer, and links to the README, lead to the repository: to `Source` in setup.cfg, or else to where this clone
  comes from. Where neither is known, they are not there.
- Docstrings are written in the style of Hugging Face, with references as [`Name`]: `References` turns these into
  links and headings of arguments into what mkdocstrings reads.
"""

import configparser
import os.path
import re
import subprocess
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "benchmarks/*.md", "benchmarks/*/*.md", "benchmarks/*/*.png")

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
README = re.compile(r"\[([^\]]+)\]\(\.\./README\.md\)")
PICTURE = re.compile(r"!\[[^\]]*\]\((?!\w+:)([^)\s]+)\)")
BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ON_GITHUB = re.compile(r"<!-- only on GitHub -->.*?<!-- end -->\n", re.DOTALL)
INLINE = re.compile(r"\$`([^`\n]+)`\$")
# Functions with a name, and what is a factor before or after one: LaTeX has a thin space there, MathML has not
NAMED = r"<mi>(?:log|exp)</mi>"
BEFORE = r"(?:</(?:mi|mn|msub|msup|mover)>|&#x02207;</mo>)"
AFTER = r"<(?:mi|mn|msub|msup|mover)\b"
THIN = '<mspace width="0.167em" />'


def on_config(config):
    config.extra["repository"] = address = repository((ROOT / "setup.cfg").read_text(), origin())
    if address:  # not as `repo_url`, for which the theme asks GitHub how many stars there are
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": address, "name": "Repository"}]
    return config


def origin():
    """Where the clone comes from, or an empty text."""
    done = subprocess.run(["git", "config", "--get", "remote.origin.url"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def repository(settings, remote):
    """The address of the repository for a browser, without a user or password in it, or `None`."""
    parser = configparser.ConfigParser()
    parser.read_string(settings)
    urls = dict(line.split(" = ", 1) for line in parser["metadata"]["project_urls"].split("\n") if line)
    address = urls.get("Source") or re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", remote)
    match = re.fullmatch(r"https://(?:[^@/]*@)?([^@]+?)(?:\.git)?/?", address)
    return f"https://{match[1]}" if match else None


def formula(text, display):
    """MathML of a formula, with room around the names of functions, and none within bars."""
    mathml = convert(text.strip(), display=display)
    mathml = mathml.replace('<mo stretchy="false">&#x0007C;', '<mo stretchy="false" lspace="0" rspace="0">&#x0007C;')
    mathml = re.sub(rf"({NAMED})(?={AFTER})", rf"\1{THIN}", mathml)
    return re.sub(rf"({BEFORE})(?={NAMED})", rf"\1{THIN}", mathml)


def displayed(text):
    """A formula on lines of its own; a line may end at \\qquad, and what is wider than the window scrolls."""
    parts = [f'<div class="part">{formula(part, "block")}</div>' for part in text.split(r"\qquad")]
    return f'<div class="formula">{"".join(parts)}</div>'


def on_files(files, config):
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def is_wide(picture):
    """Whether a picture has more in it than a phone can show at once, which our own figures have not."""
    return picture.suffix == ".png" and int.from_bytes(picture.read_bytes()[16:20]) > 800


def on_page_markdown(markdown, page, config, files):
    place = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"

    def site_link(match):
        target = os.path.normpath(os.path.join(os.path.dirname(place), match[1]))
        if target.startswith("..") or not (ROOT / target).is_file():
            return match[1]  # MkDocs warns of it
        return os.path.relpath(target.removeprefix("docs/"), os.path.dirname(page.file.src_uri) or ".")

    def marked(match):
        return match[0] + ("{.wide}" if is_wide(ROOT / os.path.dirname(place) / match[1]) else "")

    page.formulas = []

    def set_aside(match, block):
        page.formulas.append(displayed(match[1]) if block else formula(match[1], "inline"))
        return f"FORMULA{len(page.formulas) - 1}HERE"

    address = config.extra["repository"]
    markdown = README.sub(rf"[\1]({address})" if address else r"\1", markdown)
    markdown = LINK.sub(site_link, PICTURE.sub(marked, ON_GITHUB.sub("", markdown)))
    markdown = BLOCK.sub(lambda match: set_aside(match, True), markdown)
    return INLINE.sub(lambda match: set_aside(match, False), markdown)


def on_page_content(html, page, config, files):
    for number, mathml in enumerate(page.formulas):
        name = f"FORMULA{number}HERE"
        html = html.replace(f"<p>{name}</p>", mathml).replace(name, mathml)
    return html


def on_post_page(output, page, config):
    # Long names in tables may be broken after a slash. Only now, so that search has them in one piece
    def with_breaks(row):
        return re.sub(r"(?<=\w/|>/)(?=\w|&lt;)", "<wbr>", row[0])

    return re.sub(r"(?<=<code>)[^<]*(?=</code>.*</td>)", with_breaks, output)


class References(griffe.Extension):
    """Docstrings in the style of Hugging Face, as mkdocstrings reads them."""

    # `name (`type`, *optional*, defaults to `value`): text`, or several names for one text, which goes on below
    ARGUMENT = re.compile(r"^( +)(\w+(?:, \w+)*)( \(.+\))?:((?: .*)?(?:\n\1 +.*)*)", re.MULTILINE)
    NAME = re.compile(r"\[`~?([\w.]+)`\]")
    CLASSES = ("ISOPO", "ISOPOConfig", "ISOPOTrainer")

    def on_object(self, *, obj, **kwargs):
        if obj.docstring is not None:
            text = self.ARGUMENT.sub(self._arguments, obj.docstring.value).replace("> [!NOTE]\n", "")
            obj.docstring.value = self.NAME.sub(self._link, text)

    def _arguments(self, match):
        indent, names, kind, text = match.groups()
        kind = re.sub(r"`|, \*optional\*.*(?=\))", "", kind or "")  # defaults are in the signature
        return "\n".join(f"{indent}{name}{kind}:{text}" for name in names.split(", "))

    def _link(self, match):
        name = match[1].rpartition(".")[2]
        return f"[`{name}`][isopo_trl.{name}]" if name in self.CLASSES else f"`{name}`"
