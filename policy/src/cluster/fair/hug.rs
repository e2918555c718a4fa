//! HUG (Chowdhury et al., NSDI'16): fairness across correlated resources, with the leftover given
//! away.

/// Allocations and what everybody is guaranteed.
#[derive(Clone, PartialEq, Debug)]
pub struct Hug {
    /// The optimal isolation guarantee M*: everybody's progress along its demand.
    pub guarantee: f64,
    /// After the first stage: M* times the demand, as DRF.
    pub first: Vec<Vec<f64>>,
    /// After the second.
    pub shares: Vec<Vec<f64>>,
}

/// Divide resources of capacity 1 between tenants whose demand vectors are relative to their
/// greatest entry (1). Stage one gives equal progress M* = 1 / max_r sum_i d_i^r. Stage two divides
/// the rest, resource by resource and evenly, between the tenants that use it, but gives none of
/// them more than M* of any resource: a tenant that lies gains nothing (the non-cooperative form).
#[must_use]
pub fn hug(demands: &[Vec<f64>]) -> Hug {
    let resources = demands.first().map_or(0, Vec::len);
    let total = |r: usize| demands.iter().map(|demand| demand[r]).sum::<f64>();
    let busiest = (0..resources).map(total).fold(0.0, f64::max);
    let guarantee = if busiest > 0.0 { 1.0 / busiest } else { 0.0 };
    let first: Vec<Vec<f64>> = demands
        .iter()
        .map(|demand| demand.iter().map(|part| guarantee * part).collect())
        .collect();
    let mut shares = first.clone();
    for r in 0..resources {
        let mut left = 1.0 - first.iter().map(|share| share[r]).sum::<f64>();
        let mut open: Vec<usize> = (0..demands.len())
            .filter(|i| demands[*i][r] > 0.0)
            .collect();
        open.sort_by(|a, b| shares[*b][r].total_cmp(&shares[*a][r]));
        // From the one closest to its cap on, each takes an even part of what is left.
        while let Some(i) = open.first().copied() {
            let more = (left / open.len() as f64)
                .min(guarantee - shares[i][r])
                .max(0.0);
            shares[i][r] += more;
            left -= more;
            open.remove(0);
        }
    }
    Hug {
        guarantee,
        first,
        shares,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figure_of_the_paper() {
        let result = hug(&[vec![0.5, 1.0], vec![1.0, 1.0 / 6.0]]);
        let close = |a: &[Vec<f64>], b: [[f64; 2]; 2]| {
            for (a, b) in a.iter().zip(b) {
                assert!(
                    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12),
                    "{a:?} {b:?}"
                );
            }
        };
        assert!((result.guarantee - 2.0 / 3.0).abs() < 1e-12);
        close(
            &result.first,
            [[1.0 / 3.0, 2.0 / 3.0], [2.0 / 3.0, 1.0 / 9.0]],
        );
        close(
            &result.shares,
            [[1.0 / 3.0, 2.0 / 3.0], [2.0 / 3.0, 1.0 / 3.0]],
        );
    }
}
