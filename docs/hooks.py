"""
What MkDocs does not do by itself when it builds the site from pages that also have to read well on GitHub.

- Pages and pictures from outside this folder (the figures of the benchmarks, the changelog) become part of the site,
  and links between them and the pages here, which are written as they are valid in the repository, are turned to them.
- Formulas, written as GitHub writes them, become MathML, which browsers draw without a script.
- Docstrings are written in the style of Hugging Face, with references as [`Name`]: `References` turns these into
  links and headings of arguments into what mkdocstrings reads.
"""

import os.path
import re
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "benchmarks/*.md", "benchmarks/*.png")

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ON_GITHUB = re.compile(r"<!-- only on GitHub -->.*?<!-- end -->\n", re.DOTALL)
INLINE = re.compile(r"\$`([^`\n]+)`\$")


def on_files(files, config):
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    place = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"

    def site_link(match):
        target = os.path.normpath(os.path.join(os.path.dirname(place), match[1]))
        if target.startswith("..") or not (ROOT / target).is_file():
            return match[1]  # MkDocs warns of it
        return os.path.relpath(target.removeprefix("docs/"), os.path.dirname(page.file.src_uri) or ".")

    page.formulas = []

    def set_aside(match, block):
        page.formulas.append(convert(match[1].strip(), display="block" if block else "inline"))
        return f"FORMULA{len(page.formulas) - 1}HERE"

    markdown = LINK.sub(site_link, ON_GITHUB.sub("", markdown))
    markdown = BLOCK.sub(lambda match: set_aside(match, True), markdown)
    return INLINE.sub(lambda match: set_aside(match, False), markdown)


def on_page_content(html, page, config, files):
    for number, formula in enumerate(page.formulas):
        name = f"FORMULA{number}HERE"
        html = html.replace(f"<p>{name}</p>", f'<div class="formula">{formula}</div>').replace(name, formula)
    return html


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
