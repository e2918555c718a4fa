//! Slurm's lists of nodes: `n1`, `n[01-03,7],login`.

/// Names in one list at most.
const MAX_NAMES: usize = 65_536;

/// The nodes of a list, in its order. `None`: it is none that is understood, such as one with two
/// brackets in a name, or one of too many nodes.
pub(super) fn expand(list: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    let mut rest = list;
    while !rest.is_empty() {
        // Up to the next comma that is in no bracket.
        let mut depth = 0;
        let comma = rest.find(|c| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            c == ',' && depth == 0
        });
        let (one, more) = rest.split_at(comma.unwrap_or(rest.len()));
        rest = more.strip_prefix(',').unwrap_or(more);
        let Some((stem, ranges)) = one.split_once('[') else {
            names.push(one.to_owned());
            continue;
        };
        let (ranges, end) = ranges.split_once(']')?;
        if end.contains('[') {
            return None;
        }
        for range in ranges.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (low, high) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
            let count = usize::try_from(high.checked_sub(low)?).ok()?;
            if names.len().saturating_add(count) >= MAX_NAMES {
                return None;
            }
            let width = first.len();
            names.extend((low..=high).map(|number| format!("{stem}{number:0width$}{end}")));
        }
    }
    (names.len() <= MAX_NAMES).then_some(names)
}

/// Places on a node: `0`, `0-1`, `0,3-5`.
pub(super) fn places(list: &str) -> Vec<usize> {
    const MOST: usize = 1024;
    let mut all = Vec::new();
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if let (Ok(low), Ok(high)) = (first.trim().parse::<usize>(), last.trim().parse::<usize>()) {
            all.extend((low..=high).take(MOST.saturating_sub(all.len())));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_what_is_none_is_refused() {
        for (list, names) in [
            ("", &[][..]),
            ("n1", &["n1"]),
            ("n[08-10,20],login", &["n08", "n09", "n10", "n20", "login"]),
            ("n[1-2]-ib,n3", &["n1-ib", "n2-ib", "n3"]),
        ] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(expand(list), Some(names), "{list}");
        }
        for list in [
            "n[1",
            "n[3-1]",
            "n[x]",
            "n[0-18446744073709551615]",
            "n[1-9]r[1-9]",
        ] {
            assert_eq!(expand(list), None, "{list}");
        }
    }

    #[test]
    fn places_are_read_within_a_bound() {
        assert_eq!(places("0"), [0]);
        assert_eq!(places("0-1,5"), [0, 1, 5]);
        assert_eq!(places(""), [0; 0]);
        assert_eq!(places("N/A"), [0; 0]);
        assert_eq!(places("0-18446744073709551615").len(), 1024);
    }
}
