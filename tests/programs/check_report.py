#!/usr/bin/env python3
"""Checks the page of `sublet interfere`: tags nest, nothing is fetched, identities are used once, and the
files in it are those beside it.
"""
import html.parser, pathlib, sys, urllib.parse, xml.etree.ElementTree
path = pathlib.Path(sys.argv[1])
text = path.read_text(encoding="utf-8")
VOID = {"meta", "link"}
class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids, self.files = [], set(), {}
    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        assert tag != "script", tag
        for name in ("src", "href", "action", "data"):
            value = attrs.get(name) or ""
            assert value == "" or value.startswith(("data:", "#")), (tag, value)
        if "id" in attrs:
            assert attrs["id"] not in self.ids, attrs["id"]
            self.ids.add(attrs["id"])
        if "download" in attrs:
            data = attrs["href"].split(",", 1)[1]
            self.files[attrs["download"]] = urllib.parse.unquote(data)
        if tag not in VOID:
            self.open.append(tag)
    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()
    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.open)
page = Page()
page.feed(text)
assert page.open == [], page.open
for name, content in page.files.items():
    assert (path.parent / name).read_text(encoding="utf-8") == content, name
for picture in path.parent.glob("*.svg"):
    xml.etree.ElementTree.parse(picture)
assert "<svg" in text and text.startswith("<!DOCTYPE html>")
print(len(page.files), "files")
