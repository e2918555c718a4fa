//! Which module of a crate imports which, as its sources say.
//!
//! Read are `use` declarations, and paths in the code that begin with `crate`, `super`, `self` or a
//! name that a declaration has given to a module. A path that leads through `pub use` counts for
//! the module that it leads to. Not read are tests, comments, strings, and what macros put
//! together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path as File;

/// Path of a module below the root of its crate; empty: the root.
pub type Path = Vec<String>;

/// The modules of a crate.
#[derive(Default)]
pub struct Modules {
    of: BTreeMap<Path, Module>,
}

#[derive(Default)]
struct Module {
    /// What is left of the source: no comments, strings or tests.
    text: String,
    /// Names that others find here, and the paths they stand for.
    reexports: BTreeMap<String, Path>,
    /// Modules all of whose names are found here.
    globs: Vec<Path>,
}

impl Modules {
    /// The modules below `folder`, which holds `lib.rs` or `main.rs`. Programs of their own
    /// (`bin/`) are left out.
    ///
    /// # Panics
    /// Where the sources cannot be read.
    #[must_use]
    pub fn below(folder: &File) -> Self {
        let mut sources = Vec::new();
        let mut open = vec![(folder.to_owned(), Path::new())];
        while let Some((folder, path)) = open.pop() {
            for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
                let file = entry.path();
                let name = file.file_stem().unwrap_or_default().to_string_lossy();
                let mut inner = path.clone();
                if !matches!(name.as_ref(), "lib" | "main" | "mod") {
                    inner.push(name.into_owned());
                }
                if file.is_dir() {
                    if !(path.is_empty() && inner == ["bin"]) {
                        open.push((file, inner));
                    }
                } else if file.extension().is_some_and(|ending| ending == "rs") {
                    let text = std::fs::read_to_string(&file).expect("a source");
                    sources.push((inner, text));
                }
            }
        }
        Self::of(sources)
    }

    /// The modules with these sources.
    #[must_use]
    pub fn of(sources: impl IntoIterator<Item = (Path, String)>) -> Self {
        let mut all = Self::default();
        for (path, text) in sources {
            let module = all.of.entry(path).or_default();
            let text = without_scopes(&without_tests(&plain(&text)));
            module.text.push_str(&text);
        }
        // Files that nothing but tests, or nothing, declares.
        let declared = |path: &Path| {
            path.split_last().is_none_or(|(name, parent)| {
                let parent = all.of.get(parent);
                parent.is_some_and(|parent| declares(&parent.text, name))
            })
        };
        let out: Vec<Path> = (all.of.keys())
            .filter(|path| !declared(path))
            .cloned()
            .collect();
        all.of
            .retain(|path, _| !out.iter().any(|out| path.starts_with(out)));
        let found: Vec<_> = (all.of.iter())
            .flat_map(|(path, module)| {
                let uses = uses(&module.text);
                let public = uses.into_iter().filter(|found| found.public);
                public.map(|found| (path.clone(), found))
            })
            .collect();
        for (path, used) in found {
            let to = absolute(&path, &used.path).or_else(|to| all.child(&path, &to).ok_or(()));
            if let (Ok(to), Some(module)) = (to, all.of.get_mut(&path)) {
                if used.name == "*" {
                    module.globs.push(to);
                } else {
                    module.reexports.insert(used.name, to);
                }
            }
        }
        all
    }

    /// All of them, the root first.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.of.keys()
    }

    /// A path that begins with the name of a child of the module.
    fn child(&self, of: &[String], path: &[String]) -> Option<Path> {
        let full = [of, path].concat();
        self.of.contains_key(&full[..=of.len()]).then_some(full)
    }

    /// The module that a path from the root leads to.
    fn leads_to(&self, path: &[String], depth: u32) -> Path {
        let mut at = Path::new();
        for (index, name) in path.iter().enumerate() {
            let inner = [&at[..], std::slice::from_ref(name)].concat();
            if self.of.contains_key(&inner) {
                at = inner;
            } else if let Some(to) = self.of.get(&at).and_then(|of| of.reexports.get(name))
                && depth > 0
            {
                let on = [&to[..], &path[index + 1..]].concat();
                return self.leads_to(&on, depth - 1);
            } else {
                let globs = self.of.get(&at).map_or(&[][..], |of| &of.globs);
                let defines = |to: &&Path| {
                    let of = self.of.get(*to);
                    of.is_some_and(|of| defines(&of.text, name))
                };
                return globs.iter().find(defines).cloned().unwrap_or(at);
            }
        }
        at
    }

    /// What each module imports, itself left out.
    #[must_use]
    pub fn imports(&self) -> BTreeMap<Path, BTreeSet<Path>> {
        const REEXPORTS: u32 = 8;
        let imports = |path: &Path, module: &Module| {
            let mut names: BTreeMap<String, Path> = BTreeMap::new();
            let mut found = BTreeSet::new();
            for used in uses(&module.text) {
                let to = absolute(path, &used.path)
                    .or_else(|relative| self.child(path, &relative).ok_or(()));
                let Ok(to) = to else { continue };
                names.insert(used.name, to.clone());
                // What a module shows of its own parts it does not import.
                let to = self.leads_to(&to, REEXPORTS);
                if !(used.public && to.starts_with(path)) {
                    found.insert(to);
                }
            }
            for inline in inline(&module.text) {
                let to = absolute(path, &inline).or_else(|relative| {
                    let (first, rest) = relative.split_first().ok_or(())?;
                    let named = names.get(first).map(|to| [&to[..], rest].concat());
                    named.or_else(|| self.child(path, &relative)).ok_or(())
                });
                if let Ok(to) = to {
                    found.insert(self.leads_to(&to, REEXPORTS));
                }
            }
            found.remove(path);
            found
        };
        (self.of.iter())
            .map(|(path, module)| (path.clone(), imports(path, module)))
            .collect()
    }
}

/// Groups of which each imports each, by whatever way; single ones are left out.
#[must_use]
pub fn circles<T: Ord + Clone>(edges: &BTreeMap<T, BTreeSet<T>>) -> Vec<BTreeSet<T>> {
    let reached = |from: &T| {
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(at) = open.pop() {
            for to in edges.get(at).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    open.push(to);
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&T, BTreeSet<T>> = edges.keys().map(|from| (from, reached(from))).collect();
    let mut found: Vec<BTreeSet<T>> = Vec::new();
    for (from, to) in &reach {
        let back = |other: &&T| reach.get(other).is_some_and(|back| back.contains(*from));
        let circle: BTreeSet<T> = to.iter().filter(back).cloned().collect();
        if circle.len() > 1 && !found.contains(&circle) {
            found.push(circle);
        }
    }
    found
}

// ----------------------------------------------------------------------------------------------
// Reading
// ----------------------------------------------------------------------------------------------

/// A source without comments, and with nothing in its strings.
fn plain(source: &str) -> String {
    let text: Vec<char> = source.chars().collect();
    let mut left = String::new();
    let mut at = 0;
    let is = |at: usize, word: &str| {
        let word: Vec<char> = word.chars().collect();
        text[at..].starts_with(&word)
    };
    while at < text.len() {
        if is(at, "//") {
            while at < text.len() && text[at] != '\n' {
                at += 1;
            }
        } else if is(at, "/*") {
            let mut depth = 0;
            while at < text.len() {
                if is(at, "/*") {
                    (depth, at) = (depth + 1, at + 2);
                } else if is(at, "*/") {
                    (depth, at) = (depth - 1, at + 2);
                    if depth == 0 {
                        break;
                    }
                } else {
                    at += 1;
                }
            }
        } else if is(at, "r\"") || is(at, "r#\"") || is(at, "r##\"") {
            let marks = text[at + 1..].iter().take_while(|c| **c == '#').count();
            let end = format!("\"{}", "#".repeat(marks));
            at += marks + 2;
            while at < text.len() && !is(at, &end) {
                at += 1;
            }
            at += end.len();
            left.push_str("\"\"");
        } else if text[at] == '"' {
            at += 1;
            while at < text.len() && text[at] != '"' {
                at += if text[at] == '\\' { 2 } else { 1 };
            }
            at += 1;
            left.push_str("\"\"");
        } else if text[at] == '\'' && (is(at + 1, "\\") || text.get(at + 2) == Some(&'\'')) {
            // A character, not a lifetime.
            at += if is(at + 1, "\\") { 3 } else { 2 };
            while at < text.len() && text[at] != '\'' {
                at += 1;
            }
            at += 1;
            left.push_str("' '");
        } else {
            left.push(text[at]);
            at += 1;
        }
    }
    left
}

/// Whether a text has the declaration of a module in a file of its own.
fn declares(text: &str, module: &str) -> bool {
    words_after(text, "mod").any(|(name, rest)| name == module && rest.starts_with(';'))
}

/// Whether a text defines something of that name.
fn defines(text: &str, name: &str) -> bool {
    const KINDS: [&str; 8] = [
        "fn", "struct", "enum", "union", "const", "static", "type", "trait",
    ];
    KINDS
        .iter()
        .any(|kind| words_after(text, kind).any(|(found, _)| found == name))
}

/// The names that follow a keyword, each with what follows it.
fn words_after<'a>(text: &'a str, keyword: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(keyword).filter_map(move |(at, _)| {
        let after = text[at + keyword.len()..].strip_prefix(' ')?;
        let end = after.find(|c| !is_name(c)).unwrap_or(after.len());
        let apart = !text[..at].ends_with(is_name);
        apart.then(|| (&after[..end], after[end..].trim_start()))
    })
}

/// Leaves out what is built for tests alone.
fn without_tests(text: &str) -> String {
    const TEST: &str = "#[cfg(test)]";
    let mut left = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(TEST) {
        left.push_str(&rest[..at]);
        rest = rest[at + TEST.len()..].trim_start();
        while rest.starts_with('#') {
            rest = rest[closing(rest, '[', ']')..].trim_start();
        }
        let end = rest.find([';', '{']).unwrap_or(rest.len());
        if rest[end..].starts_with('{') {
            rest = &rest[end + closing(&rest[end..], '{', '}')..];
        } else {
            rest = &rest[(end + 1).min(rest.len())..];
        }
    }
    left.push_str(rest);
    left
}

/// Leaves out who may see something (`pub(in path)`): that is no import.
fn without_scopes(text: &str) -> String {
    let mut parts = text.split("pub(in ");
    let mut left = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        left.push_str("pub");
        left.push_str(part.split_once(')').map_or("", |(_, after)| after));
    }
    left
}

/// Length of `text` up to where its first bracket is closed.
fn closing(text: &str, open: char, close: char) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        if c == open {
            depth += 1;
        } else if c == close {
            depth -= 1;
            if depth == 0 {
                return at + c.len_utf8();
            }
        }
    }
    text.len()
}

/// A path that a declaration names.
struct Use {
    public: bool,
    /// The name that it has from then on.
    name: String,
    path: Vec<String>,
}

/// What all declarations of a text name.
fn uses(text: &str) -> Vec<Use> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("use ") {
        let before = text[..at].trim_end();
        let begins = before.is_empty() || before.ends_with([';', '{', '}', ')', ']']);
        let public = before.ends_with("pub") || before.ends_with(')');
        if !(begins || public) {
            continue;
        }
        let inside = enclosing(text, at);
        let Some(end) = text[at..].find(';') else {
            continue;
        };
        let mut trees = Vec::new();
        expand(&mut Vec::new(), &text[at + 4..at + end], &mut trees);
        for (mut path, name) in trees {
            // Modules in braces are a part of the one that they stand in.
            let up = path.iter().take_while(|name| *name == "super").count();
            path.drain(..up.min(inside));
            if up > 0 && up <= inside {
                path.insert(0, "self".to_owned());
            }
            found.push(Use { public, name, path });
        }
    }
    found
}

/// How many modules in braces a place is in.
fn enclosing(text: &str, place: usize) -> usize {
    let modules = text[..place].match_indices("mod ");
    modules
        .filter(|(at, _)| {
            let rest = &text[at + 4..];
            let name = rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_');
            let brace = at + 4 + (rest.len() - name.len());
            name.trim_start().starts_with('{') && brace + closing(&text[brace..], '{', '}') > place
        })
        .count()
}

/// The paths of a tree, each with the name that it has from then on.
fn expand(before: &mut Vec<String>, tree: &str, found: &mut Vec<(Vec<String>, String)>) {
    let tree = tree.trim();
    let (path, inner) = match tree.split_once('{') {
        Some((path, inner)) => (path, Some(inner.trim_end().trim_end_matches('}'))),
        None => (tree, None),
    };
    let (path, alias) = match path.split_once(" as ") {
        Some((path, alias)) => (path, Some(alias.trim())),
        None => (path, None),
    };
    let length = before.len();
    let names = path.split("::").map(str::trim);
    before.extend(names.filter(|name| !name.is_empty()).map(str::to_owned));
    if let Some(inner) = inner {
        let (mut depth, mut from) = (0, 0);
        for (at, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !inner[from..at].trim().is_empty() {
                        expand(before, &inner[from..at], found);
                    }
                    from = at + 1;
                }
                _ => {}
            }
        }
    } else {
        let mut path = before.clone();
        let last = path.last().cloned().unwrap_or_default();
        if path.len() > 1 && (last == "self" || last == "*") {
            path.pop();
        }
        let name = match (alias, last.as_str()) {
            (Some(alias), _) => alias.to_owned(),
            (None, "self") => path.last().cloned().unwrap_or_default(),
            (None, last) => last.to_owned(),
        };
        found.push((path, name));
    }
    before.truncate(length);
}

/// Paths in the code, declarations left out.
fn inline(text: &str) -> BTreeSet<Vec<String>> {
    let mut found = BTreeSet::new();
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = text;
    let mut before = ' ';
    while let Some(at) = rest.find(is_name) {
        if at > 0 {
            before = rest[..at].chars().next_back().unwrap_or(' ');
        }
        rest = &rest[at..];
        let mut path = Vec::new();
        loop {
            let end = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
            path.push(rest[..end].to_owned());
            rest = &rest[end..];
            match rest.strip_prefix("::") {
                Some(on) if on.starts_with(is_name) => rest = on,
                _ => break,
            }
        }
        if path == ["use"] {
            rest = rest.split_once(';').map_or("", |(_, after)| after);
        } else if path.len() > 1 && before != ':' && before != '.' {
            found.insert(path);
        }
        before = ' ';
    }
    found
}

/// A path from the root, for one that is said in the module `at`; else the path again: it begins
/// with a name.
fn absolute(at: &[String], path: &[String]) -> Result<Path, Path> {
    let mut here = at.to_vec();
    let mut rest = path;
    match rest.first().map(String::as_str) {
        Some("crate") => return Ok(rest[1..].to_vec()),
        Some("self" | "super") => {}
        _ => return Err(path.to_vec()),
    }
    while let Some(first @ ("self" | "super")) = rest.first().map(String::as_str) {
        if first == "super" {
            here.pop();
        }
        rest = &rest[1..];
    }
    here.extend_from_slice(rest);
    Ok(here)
}
