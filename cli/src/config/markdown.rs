//! The page of all settings, made from the tables: what is in docs/reference/settings.md.

use control::setting::About;
use control::{DeviceSettings, JobSettings, Settings};

use super::sections::{SECTIONS, keys};

const HEAD: &str = "\
# Settings

Every setting of the quota files, with its flag and its environment variable. `sublet config schema
--markdown` makes this page. [config.md](config.md) says where the files lie, how sections match and
who beats whom.

A flag beats the environment variable, which beats the quota file. An empty variable counts as
unset. Settings that are *live* can be changed while the job runs, with `sublet set`, or while
devices are in use, with `sublet device set`. File, flag and variable take the same text, in the
file in quotes: `mem = \"8GiB\"`, `--mem 8GiB`, `SUBLET_MEM=8GiB`. In the file, numbers and booleans
may stand bare.

";

pub fn text() -> String {
    let mut text = HEAD.to_owned();
    text += "## Jobs\n\nIn `[defaults]` and in `set` of a `[[rule]]`, and as flags of `sublet run`.\n\n";
    for about in keys::<JobSettings>() {
        let names = format!(
            "`{}`, `--{}`, `{}`",
            about.key,
            about.flag(),
            about.variable()
        );
        text += &item(&names, &about);
    }
    for section in &SECTIONS {
        if section.name == "defaults" {
            continue;
        }
        text += &format!(
            "\n## `{}`\n\n{}\n\n",
            section.heading(),
            wrapped(section.doc, "")
        );
        for about in (section.keys)() {
            let has = |setting: &str| setting == about.key;
            let mut names = format!("`{}`", about.key);
            if about.live && DeviceSettings::TABLE.iter().any(|s| has(s.about.key)) {
                names += &format!(", `--{}` of `sublet device set`", about.flag());
            }
            text += &item(&names, &about);
        }
        for part in section.parts {
            text += &format!("### `{}`\n\n{}\n\n", part.name, wrapped(part.doc, ""));
            let keys = (part.keys)();
            if keys.iter().any(|about| about.key == "mem") {
                let names: Vec<String> = keys
                    .iter()
                    .map(|about| format!("`{}`", about.key))
                    .collect();
                let names = format!("Of [jobs](#jobs): {}.", names.join(", "));
                text += &format!("{}\n\n", wrapped(&names, ""));
                continue;
            }
            for about in keys {
                text += &item(&format!("`{}`", about.key), &about);
            }
            text.push('\n');
        }
        while text.ends_with("\n\n") {
            text.pop();
        }
    }
    text
}

fn item(names: &str, about: &About) -> String {
    let live = if about.live { ", live" } else { "" };
    let line = format!(
        "* {names}{live}: {} Example: `{}`. Default: {}.",
        about.doc().replace('*', "\\*"),
        about.kind.example,
        about.unset
    );
    wrapped(&line, "  ") + "\n"
}

/// Lines of at most 100 columns; those after the first begin with `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut columns = 0;
    for word in text.split(' ') {
        let width = word.chars().count();
        if columns > 0 && columns + 1 + width > 100 {
            lines += "\n";
            lines += indent;
            columns = indent.len();
        } else if columns > 0 {
            lines.push(' ');
            columns += 1;
        }
        lines += word;
        columns += width;
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::sections::{SECTIONS, caps};

    #[test]
    fn the_page_of_quota_files_has_every_section_and_every_key_to_match_and_to_cap() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/config.md");
        let page = std::fs::read_to_string(path).unwrap();
        for section in &SECTIONS {
            assert!(
                page.contains(&format!("`{}`", section.heading())),
                "{}",
                section.name
            );
            for part in section.parts {
                assert!(page.contains(&format!("`{}`", part.name)), "{}", part.name);
                if part.name == "match" {
                    for about in (part.keys)() {
                        assert!(
                            page.contains(&format!("| `{}` | ", about.key)),
                            "{}",
                            about.key
                        );
                    }
                }
            }
            if section.name == "user" {
                for about in (section.keys)().iter().skip(1) {
                    assert!(page.contains(&format!("`{}`", about.key)), "{}", about.key);
                }
            }
        }
        for about in caps() {
            assert!(
                page.contains(&format!("| `{}` | ", about.key)),
                "{}",
                about.key
            );
        }
    }

    #[test]
    fn the_committed_page_is_the_one_printed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/settings.md");
        let committed = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            committed,
            super::text(),
            "run `sublet config schema --markdown > docs/reference/settings.md`"
        );
    }

    #[test]
    fn no_line_is_wider_than_a_page() {
        let text = super::text();
        assert!(text.contains("`--share-min`") && text.contains("`quantum_min`"));
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }
}
