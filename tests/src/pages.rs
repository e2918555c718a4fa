//! The project's Markdown: which pages there are, what they link to, and whether that exists.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// All Markdown files below `root`, relative to it, without build outputs and hidden folders.
///
/// # Panics
/// Where a folder cannot be read.
pub fn all(root: &Path) -> BTreeSet<PathBuf> {
    let mut open = vec![root.to_owned()];
    let mut found = BTreeSet::new();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if folder && !name.starts_with('.') && name != "target" && name != "node_modules" {
                open.push(path);
            } else if !folder && name.ends_with(".md") {
                let relative = path.strip_prefix(root).expect("below the root");
                found.insert(relative.to_owned());
            }
        }
    }
    found
}

/// The lines of a page that are neither in a fenced code block nor its fences.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return false;
        }
        !fenced
    })
}

/// A line without its inline code.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Targets of the links of a page.
pub fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for line in prose(text) {
        let line = without_code(line);
        for part in line.split("](").skip(1) {
            if let Some((target, _)) = part.split_once(')') {
                found.push(target.to_owned());
            }
        }
        if let Some((name, target)) = line.split_once("]: ")
            && name.starts_with('[')
        {
            found.push(target.trim().to_owned());
        }
    }
    found
}

/// The names under which the headings of a page can be linked to.
pub fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen = BTreeMap::<String, usize>::new();
    let mut found = BTreeSet::new();
    for line in prose(text) {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let name = anchor(title.trim());
        let times = seen.entry(name.clone()).or_default();
        found.insert(match *times {
            0 => name,
            more => format!("{name}-{more}"),
        });
        *times += 1;
    }
    found
}

/// The name of one heading: lower case, hyphens for spaces, without punctuation.
fn anchor(title: &str) -> String {
    let mut shown = String::new();
    let mut rest = title;
    // A link in a heading counts with its text only.
    while let Some((before, link)) = rest.split_once("](") {
        shown.push_str(before);
        rest = link.split_once(')').map_or("", |(_, after)| after);
    }
    shown.push_str(rest);
    shown
        .chars()
        .filter_map(|char| match char {
            ' ' => Some('-'),
            '-' | '_' => Some(char),
            _ if char.is_alphanumeric() => char.to_lowercase().next(),
            _ => None,
        })
        .collect()
}

/// What is wrong with the relative links of all pages below `root`.
///
/// # Panics
/// Where a page cannot be read.
pub fn broken(root: &Path) -> Vec<String> {
    let read = |path: &Path| std::fs::read_to_string(path).expect("a page");
    let mut wrong = Vec::new();
    for page in all(root) {
        let text = read(&root.join(&page));
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() {
                page.clone()
            } else {
                normal(&page.parent().expect("a folder").join(path))
            };
            let there = root.join(&target);
            if !there.exists() {
                wrong.push(format!("{}: no file {path}", page.display()));
            } else if !anchor.is_empty()
                && target.extension().is_some_and(|ending| ending == "md")
                && !anchors(&read(&there)).contains(anchor)
            {
                wrong.push(format!(
                    "{}: no heading #{anchor} in {}",
                    page.display(),
                    target.display()
                ));
            }
        }
    }
    wrong
}

/// A path without `..` and `.`.
pub fn normal(path: &Path) -> PathBuf {
    let mut parts = Vec::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir => {}
            other => parts.push(other),
        }
    }
    parts.iter().collect()
}

/// Whether a page begins with a title and a paragraph of text, which says what the page is for.
pub fn begins_with_purpose(text: &str) -> bool {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let title = lines.next().is_some_and(|line| line.starts_with("# "));
    let first = lines.next().unwrap_or_default();
    let block = ["#", "|", "- ", "* ", "```", ">", "<", "1.", "!"];
    title && !block.iter().any(|start| first.starts_with(start))
}

/// The shell commands of a page: its blocks that are fenced as `sh`.
pub fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut block: Option<String> = None;
    for line in text.lines() {
        match (&mut block, line.trim_end()) {
            (None, "```sh") => block = Some(String::new()),
            (Some(_), "```") => found.extend(block.take()),
            (Some(lines), line) => {
                lines.push_str(line);
                lines.push('\n');
            }
            (None, _) => {}
        }
    }
    found
}

/// What a page says of itself in a comment `<!-- NAME: a | b -->`: the parts, without the blanks
/// around them; nothing where there is no such comment.
pub fn remarks(text: &str, name: &str) -> Vec<String> {
    let begin = format!("<!-- {name}: ");
    let found = text.lines().filter_map(|line| {
        let line = line.trim().strip_prefix(&begin)?;
        line.strip_suffix(" -->")
    });
    found
        .flat_map(|parts| parts.split(" | "))
        .map(|part| part.trim().to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_remarks_what_it_shows_and_needs() {
        let text = "# T\n\n<!-- shows: a b | c -->\ntext <!-- shows: d -->\n<!-- needs: e -->\n";
        assert_eq!(remarks(text, "shows"), ["a b", "c"]);
        assert_eq!(remarks(text, "needs"), ["e"]);
        assert!(remarks(text, "other").is_empty());
    }

    #[test]
    fn links_in_code_count_for_nothing() {
        let text = "see [a](a.md), `[b](b.md)` and\n```text\n[c](c.md)\n```\n[d]: d.md#e\n";
        assert_eq!(links(text), ["a.md", "d.md#e"]);
    }

    #[test]
    fn headings_are_named_as_they_are_linked_to() {
        let text = "# What a quota is charged\n## `sublet run`\n## Hints: sublet.Pipeline\n\
                    ### [A](b.md) again\n## `sublet run`\n```sh\n# no heading\n```\n#hash\n";
        let names: Vec<_> = anchors(text).into_iter().collect();
        assert_eq!(
            names,
            [
                "a-again",
                "hints-subletpipeline",
                "sublet-run",
                "sublet-run-1",
                "what-a-quota-is-charged"
            ]
        );
    }

    #[test]
    fn broken_links_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let put = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a page");
        };
        put(
            "a.md",
            "# A\n[b](docs/b.md#b) [self](#a) [x](x.md) [y](docs/b.md#y)",
        );
        put(
            "docs/b.md",
            "# B\n[a](../a.md) [c](c.md) [web](https://example.com/)",
        );
        assert_eq!(
            broken(dir.path()),
            [
                "a.md: no file x.md",
                "a.md: no heading #y in docs/b.md",
                "docs/b.md: no file c.md"
            ]
        );
    }

    #[test]
    fn a_page_that_begins_with_a_table_says_not_what_it_is_for() {
        assert!(begins_with_purpose("# T\n\nWhat it is for.\n"));
        assert!(!begins_with_purpose("# T\n\n| a |\n"));
        assert!(!begins_with_purpose("What it is for.\n"));
    }

    #[test]
    fn commands_are_the_blocks_of_shell() {
        let text = "```sh\na\nb\n```\n```console\n$ c\n```\n```sh\nd\n```\n";
        assert_eq!(commands(text), ["a\nb\n", "d\n"]);
    }
}
