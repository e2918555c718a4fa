//! What a misspelt name was probably meant to be: the one "did you mean" of the workspace.

/// The candidate that `word` was probably meant to be, if any is near enough.
///
/// Letters of either case, `-` and `_` count as equal. Near is an edit distance (insertions,
/// deletions, exchanges and swaps of neighbours) of at most a quarter of the candidate and one
/// more, or one of both being the beginning of the other. The nearest wins, the first of equals.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.to_ascii_lowercase().replace('-', "_");
    let word = plain(word);
    candidates
        .into_iter()
        .map(|candidate| {
            let known = plain(candidate);
            let distance = strsim::damerau_levenshtein(&word, &known);
            let begins = word.len() >= 3
                && known.len() >= 3
                && (known.starts_with(&word) || word.starts_with(&known));
            // A word that shares no letter with a short candidate is not near it.
            let near = distance <= 1 + known.len() / 4 && distance < known.len().max(2);
            ((near || begins).then_some(distance), candidate)
        })
        .filter_map(|(distance, candidate)| Some((distance?, candidate)))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let keys = [
            "mem",
            "share",
            "class",
            "device",
            "on_arbiter_loss",
            "2d-las",
            "at",
        ];
        for (word, meant) in [
            ("shaer", Some("share")),
            ("Share", Some("share")),
            ("memory", Some("mem")),
            ("devices", Some("device")),
            ("on-arbiter-loss", Some("on_arbiter_loss")),
            ("on_arbitre_los", Some("on_arbiter_loss")),
            ("2d_lsa", Some("2d-las")),
            ("aat", Some("at")),
            ("colour", None),
            ("x", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, keys), meant, "{word}");
        }
    }
}
