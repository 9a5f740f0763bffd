"""Complete the package's metadata when it is built: links for a package index.

An index shows README.md without the repository, so relative links would be broken. Hatchling calls
the hook, which pyproject.toml names with the repository's address.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!?\[[^\[\]]*\]\([^()]*\))*)\]\((?![a-z]+:|#|/)([^()\s]+)\)")


class PackageMetadata(MetadataHookInterface):
    """Adds `urls`, and as `readme` README.md with absolute links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add links and readme. Hatchling calls this with the version."""
        repository = self.config["repository"].rstrip("/")
        tag = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute_links(text, repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {"Paper": "https://arxiv.org/abs/2605.13030"}
        if repository:
            metadata["urls"] |= {
                "Homepage": repository,
                "Documentation": f"{repository}/blob/{tag}/docs/index.md",
                "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a Markdown text whose relative links and images lead into a repository at a tag.

    Without a repository, links become their words.
    """

    def absolute(link: re.Match[str]) -> str:
        mark, words, target = link.groups()
        kind = "raw" if mark else "blob"
        words = _LINK.sub(absolute, words)  # an image may be the text of a link
        if not repository:
            return words
        return f"{mark}[{words}]({repository}/{kind}/{tag}/{target})"

    return _LINK.sub(absolute, text)
