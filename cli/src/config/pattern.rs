//! Patterns over names and commands: `*` is any run of characters, `?` any one, everything else
//! itself.

use std::fmt;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Whether the whole of `text` fits. Linear but for the last star, so no pattern is slow.
    pub fn matches(&self, text: &str) -> bool {
        let pattern: Vec<char> = self.0.chars().collect();
        let text: Vec<char> = text.chars().collect();
        let (mut p, mut t) = (0, 0);
        // Where the last star stood, and how much of the text it has eaten.
        let mut star: Option<(usize, usize)> = None;
        while t < text.len() {
            match pattern.get(p) {
                Some('*') => {
                    star = Some((p, t));
                    p += 1;
                }
                Some(c) if *c == '?' || *c == text[t] => {
                    p += 1;
                    t += 1;
                }
                _ => {
                    let Some((at, eaten)) = star else {
                        return false;
                    };
                    star = Some((at, eaten + 1));
                    p = at + 1;
                    t = eaten + 1;
                }
            }
        }
        pattern[p..].iter().all(|c| *c == '*')
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks() {
        for (pattern, text, fits) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", true),
            ("*", "anything", true),
            ("a*", "a", true),
            ("a*c", "abbc", true),
            ("a*c", "abbd", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*ab", "aab", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("?", "é", true),
            ("train", "train2", false),
            ("[a]", "[a]", true),
        ] {
            assert_eq!(
                Pattern::new(pattern).matches(text),
                fits,
                "{pattern} {text}"
            );
        }
        let hard = "*a".repeat(30);
        assert!(!Pattern::new(hard).matches(&"a".repeat(29)));
    }
}
