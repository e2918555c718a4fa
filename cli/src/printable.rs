//! The words of other users, command lines above all, as they may be shown on a terminal.

/// What would end the line, move the cursor or turn the direction of writing is shown as its code.
pub fn printable(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '\u{61c}'
            | '\u{200e}'
            | '\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2066}'..='\u{2069}' => {
                shown.extend(char.escape_unicode());
            }
            char if char.is_control() => shown.extend(char.escape_default()),
            char => shown.push(char),
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
            printable("a\nb\x1b[2Jc\r\u{9b}d\u{202e}e\u{2028}\tf ü 漢"),
            "a\\nb\\u{1b}[2Jc\\r\\u{9b}d\\u{202e}e\\u{2028}\\tf ü 漢"
        );
    }
}
