#!/usr/bin/env python3
"""Checks the page of `sublet interfere`: tags nest, nothing is fetched, identities are used once, and the
files in it are those beside it.
"""
import html.parser, os, pathlib, re, shutil, struct, subprocess, sys, tempfile, urllib.parse, xml.etree.ElementTree, zlib
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


def pixels(data):
    """The colours of a PNG of 8 bits without interlacing."""
    at, packed = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert depth == 8 and colour in (2, 6), (depth, colour)
        elif kind == b"IDAT":
            packed += body
        at += 12 + length
    size = 3 if colour == 2 else 4
    raw, line = zlib.decompress(packed), bytearray(width * size)
    found = set()
    for row in range(height):
        begin = row * (width * size + 1)
        kind, new = raw[begin], bytearray(raw[begin + 1 : begin + 1 + width * size])
        for x in range(len(new)):
            left = new[x - size] if x >= size else 0
            corner = line[x - size] if x >= size else 0
            above = line[x]
            if kind == 4:
                guess = left + above - corner
                add = min((left, above, corner), key=lambda one: abs(guess - one))
            else:
                add = (0, left, above, (left + above) // 2)[kind]
            new[x] = (new[x] + add) & 255
        line = new
        found.update(bytes(line[x : x + 3]) for x in range(0, len(line), size))
    return found


def seen_by(browser):
    """What a browser without a network shows: the colours of the heat map, and no word of an error."""
    with tempfile.TemporaryDirectory() as home:
        picture = pathlib.Path(home) / "page.png"
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={home}/user"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--window-size=900,700"]
        command += [f"--screenshot={picture}", path.resolve().as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=180, env={"HOME": home, "PATH": "/usr/bin:/bin"})
        except subprocess.TimeoutExpired:
            return "left out: the browser did not end"
        if done.returncode != 0 or not picture.exists():
            return f"left out: the browser does not start here ({done.returncode})"
        assert "CONSOLE" not in done.stderr, done.stderr
        colours = pixels(picture.read_bytes())
    wanted = set(re.findall(r'<rect x="[0-9.]+" y="[0-9.]+" width="58" height="18" fill="#([0-9a-f]{6})"', text))
    assert len(wanted) == 6, wanted
    missing = {one for one in wanted if bytes.fromhex(one) not in colours}
    assert not missing, missing
    return "a browser shows the heat map, and its console is empty"


named = os.environ.get("SUBLET_TEST_BROWSER")
found = (shutil.which(name) for name in ([named] if named else ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]))
browser = next((path for path in found if path), None)
print(seen_by(browser) if browser else "left out: no browser is installed")
