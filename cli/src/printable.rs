//! The words of other users, command lines above all, as they may be shown on a terminal.

use unicode_width::UnicodeWidthChar;

/// What takes no place of its own although it has a width somewhere, or is drawn as nothing: soft
/// hyphen, fillers of Hangul, the blank pattern of Braille.
const BLANK: [char; 6] = [
    '\u{ad}', '\u{115f}', '\u{1160}', '\u{3164}', '\u{ffa0}', '\u{2800}',
];

/// Whether it is seen as what it is: neither a control character, nor a format character (general
/// category Cf) or a mark (Mn, Me), which have no width, nor what is to be ignored where it is not
/// understood (Default_Ignorable_Code_Point): with any of these two names look alike and are not.
fn is_seen(char: char) -> bool {
    let ignorable = matches!(char,
        '\u{600}'..='\u{605}'
        | '\u{6dd}'
        | '\u{70f}'
        | '\u{890}'..='\u{891}'
        | '\u{8e2}'
        | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}'
        | '\u{fff0}'..='\u{fffb}'
        | '\u{110bd}'
        | '\u{110cd}'
        | '\u{e0000}'..='\u{e0fff}');
    !ignorable && !BLANK.contains(&char) && char.width().is_some_and(|width| width > 0)
}

/// What would end the line, move the cursor, turn the direction of writing or not be seen is shown
/// as its code.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        if char.is_control() {
            shown.extend(char.escape_default());
        } else if is_seen(char) {
            shown.push(char);
        } else {
            shown.extend(char.escape_unicode());
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_but_what_is_seen() {
        assert_eq!(
            printable("a\nb\x1b[2Jc\r\u{9b}d\u{202e}e\u{2028}\tf \u{fc} \u{6f22}"),
            "a\\nb\\u{1b}[2Jc\\r\\u{9b}d\\u{202e}e\\u{2028}\\tf \u{fc} \u{6f22}"
        );
    }

    #[test]
    fn no_two_names_look_alike_by_what_is_not_seen() {
        // Zero width, joiners, marks, tags, variation selectors, fillers, the byte order mark.
        let unseen = [
            '\u{200b}',
            '\u{200c}',
            '\u{200d}',
            '\u{200e}',
            '\u{61c}',
            '\u{2060}',
            '\u{2064}',
            '\u{2069}',
            '\u{feff}',
            '\u{fe0f}',
            '\u{34f}',
            '\u{301}',
            '\u{489}',
            '\u{180e}',
            '\u{ad}',
            '\u{115f}',
            '\u{3164}',
            '\u{ffa0}',
            '\u{2800}',
            '\u{fff9}',
            '\u{1d173}',
            '\u{e0001}',
            '\u{e0041}',
            '\u{e0100}',
            '\u{110bd}',
            '\u{600}',
        ];
        let alike: Vec<char> = unseen
            .into_iter()
            .filter(|char| {
                printable(&format!("tra{char}in")) != format!("tra\\u{{{:x}}}in", *char as u32)
            })
            .collect();
        println!("now: {} of {} pass unseen", alike.len(), unseen.len());
        assert_eq!(alike, []);
        for text in [
            "caf\u{e9} \u{6f22}\u{5b57}",
            "\u{41f}\u{440}\u{438}",
            "\u{1f680} go",
            "a\u{a0}b",
        ] {
            assert_eq!(printable(text), text);
        }
    }
}
