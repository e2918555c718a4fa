//! Which device of which node a pod should have: where it fits with the least memory left over, so
//! that large pods find space; of those the one with the most time left. It measures nothing.

/// What a pod wants of one device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Wish {
    /// For people.
    pub name: String,
    /// The key of what is known of such jobs.
    pub kind: String,
    /// What the node's arbiter calls it, once its device plugin has said so.
    pub job: Option<String>,
    pub memory_gib: u64,
    /// Part of the time; `None`: it has not said.
    pub share: Option<f64>,
}

/// A device, with what is left of it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Candidate {
    pub node: String,
    pub uuid: String,
    pub total_gib: u64,
    pub free_gib: u64,
    pub free_share: f64,
    /// Pods that are there, with what they wished.
    pub residents: Vec<Wish>,
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Which candidate; `None`: none of them can take it.
    pub at: Option<usize>,
    /// Why there, for people.
    pub reason: String,
    /// Of each candidate, why not; `None`: it could.
    pub unfit: Vec<Option<String>>,
}

/// What rounding leaves of shares that add up to one.
const NEARLY: f64 = 1e-9;

/// Why a candidate cannot take a pod; `None`: it can.
pub fn why_not(wish: &Wish, one: &Candidate) -> Option<String> {
    if one.free_gib < wish.memory_gib {
        return Some(format!(
            "{} has {} GiB free of {}, and {} are asked for",
            one.uuid, one.free_gib, one.total_gib, wish.memory_gib
        ));
    }
    let share = wish.share.unwrap_or(0.0);
    (share > one.free_share + NEARLY).then(|| {
        format!(
            "{} has a share of {} free, and {share} is asked for",
            one.uuid,
            short(one.free_share)
        )
    })
}

/// What a node lacks of which no device can take a pod, in words that are the same for all that
/// lack the same.
pub fn lack(wish: &Wish, candidates: &[Candidate]) -> String {
    let share = wish.share.unwrap_or(0.0);
    let memory = |one: &Candidate| one.free_gib >= wish.memory_gib;
    let time = |one: &Candidate| share <= one.free_share + NEARLY;
    let gib = wish.memory_gib;
    if !candidates.iter().any(memory) {
        format!("no GPU with {gib} GiB free")
    } else if !candidates.iter().any(time) {
        format!("no GPU with a share of {share} free")
    } else {
        format!("no GPU with both {gib} GiB and a share of {share} free")
    }
}

fn short(share: f64) -> String {
    let text = format!("{:.4}", share.max(0.0));
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// The device that fits best.
pub fn choose(wish: &Wish, candidates: &[Candidate]) -> Choice {
    let unfit: Vec<_> = candidates.iter().map(|one| why_not(wish, one)).collect();
    let fitting = candidates
        .iter()
        .enumerate()
        .filter(|(at, _)| unfit.get(*at).is_some_and(Option::is_none));
    let best = fitting.min_by(|(_, a), (_, b)| {
        let by_memory = a.free_gib.cmp(&b.free_gib);
        by_memory
            .then_with(|| b.free_share.total_cmp(&a.free_share))
            .then_with(|| (&a.node, &a.uuid).cmp(&(&b.node, &b.uuid)))
    });
    let reason = best.map_or_else(
        || "no device has the memory and the share".to_owned(),
        |(_, one)| {
            format!(
                "fits most tightly: {} of {} GiB stay free beside {} others",
                one.free_gib.saturating_sub(wish.memory_gib),
                one.total_gib,
                one.residents.len()
            )
        },
    );
    Choice {
        at: best.map(|(at, _)| at),
        reason,
        unfit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(uuid: &str, free_gib: u64, free_share: f64) -> Candidate {
        Candidate {
            node: "n".into(),
            uuid: uuid.into(),
            total_gib: 80,
            free_gib,
            free_share,
            residents: Vec::new(),
        }
    }

    fn wish(memory_gib: u64, share: f64) -> Wish {
        Wish {
            name: "p".into(),
            memory_gib,
            share: Some(share),
            ..Wish::default()
        }
    }

    #[test]
    fn the_tightest_device_with_time_left_takes_it() {
        let all = [
            candidate("a", 80, 1.0),
            candidate("b", 30, 0.2),
            candidate("c", 40, 0.7),
        ];
        let at = |wish: &Wish| choose(wish, &all).at;
        assert_eq!(at(&wish(30, 0.2)), Some(1));
        assert_eq!(at(&wish(30, 0.5)), Some(2), "b has no time left");
        assert_eq!(at(&wish(41, 0.1)), Some(0));
        assert_eq!(at(&wish(81, 0.1)), None);
        let choice = choose(&wish(35, 0.8), &all);
        assert_eq!(choice.at, Some(0));
        assert!(
            choice.unfit[1]
                .as_ref()
                .unwrap()
                .contains("30 GiB free of 80")
        );
        assert!(
            choice.unfit[2]
                .as_ref()
                .unwrap()
                .contains("share of 0.7 free")
        );
        let lacks = |gib, share| lack(&wish(gib, share), &all);
        assert_eq!(lacks(81, 0.1), "no GPU with 81 GiB free");
        assert_eq!(
            lack(&wish(30, 0.9), &all[1..]),
            "no GPU with a share of 0.9 free"
        );
        assert_eq!(
            lack(
                &wish(35, 0.9),
                &[candidate("d", 40, 0.1), candidate("e", 20, 1.0)]
            ),
            "no GPU with both 35 GiB and a share of 0.9 free"
        );
        let unsaid = Wish {
            share: None,
            ..wish(30, 0.0)
        };
        assert_eq!(at(&unsaid), Some(1));
    }
}
