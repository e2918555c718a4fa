//! Max-min division by share: nobody gets more than it wants, and what is left over goes to the
//! others by share.

/// A claim on a part of the device.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Claim {
    /// Weight among the others.
    pub share: f64,
    /// What it could use.
    pub want: f64,
    /// What it gets.
    pub gets: f64,
}

/// Divides `total` among the claims: fills in what each gets. Returns what nobody wants.
pub(super) fn divide(total: f64, claims: &mut [Claim]) -> f64 {
    let mut left = total.max(0.0);
    for claim in claims.iter_mut() {
        claim.gets = f64::NAN;
    }
    loop {
        let open = |claim: &&Claim| claim.gets.is_nan();
        let shares: f64 = claims.iter().filter(open).map(|claim| claim.share).sum();
        if shares <= 0.0 {
            break;
        }
        let level = left / shares;
        let (mut taken, mut content) = (0.0, 0);
        for claim in claims.iter_mut().filter(|claim| claim.gets.is_nan()) {
            if claim.want <= level * claim.share + 1e-9 {
                claim.gets = claim.want;
                taken += claim.want;
                content += 1;
            }
        }
        if content == 0 {
            for claim in claims.iter_mut().filter(|claim| claim.gets.is_nan()) {
                claim.gets = level * claim.share;
            }
            return 0.0;
        }
        left = (left - taken).max(0.0);
    }
    for claim in claims.iter_mut().filter(|claim| claim.gets.is_nan()) {
        claim.gets = 0.0;
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claims(of: &[(f64, f64)]) -> Vec<Claim> {
        of.iter()
            .map(|(share, want)| Claim {
                share: *share,
                want: *want,
                gets: 0.0,
            })
            .collect()
    }

    #[test]
    fn what_one_job_leaves_goes_to_the_others_by_share() {
        let mut of = claims(&[(0.5, 0.1), (0.25, 1.0), (0.25, 1.0)]);
        let left = divide(1.0, &mut of);
        assert_eq!(left, 0.0);
        assert!((of[0].gets - 0.1).abs() < 1e-9);
        assert!((of[1].gets - 0.45).abs() < 1e-9, "{of:?}");
        assert!((of[2].gets - 0.45).abs() < 1e-9);
    }

    #[test]
    fn nobody_gets_more_than_it_wants() {
        let mut of = claims(&[(1.0, 0.2), (3.0, 0.3)]);
        assert!((divide(1.0, &mut of) - 0.5).abs() < 1e-9);
        assert_eq!((of[0].gets, of[1].gets), (0.2, 0.3));
    }

    #[test]
    fn no_share_and_nobody_divide_nothing() {
        assert_eq!(divide(1.0, &mut []), 1.0);
        let mut of = claims(&[(0.0, 0.5)]);
        divide(1.0, &mut of);
        assert_eq!(of[0].gets, 0.0);
    }
}
