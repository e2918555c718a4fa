//! The UCI optical handwritten digits, and their fixed split into training and held-out images.

use crate::rng::Rng;

/// Pixels of an image.
pub const PIXELS: u32 = 64;
/// Classes.
pub const CLASSES: u32 = 10;
/// Images held out for the evaluation.
pub const HELD_OUT: usize = 360;

/// Decides which images are held out, whatever the seed of a run is.
const SPLIT_SEED: u64 = 1998;

const CSV: &str = include_str!("../data/digits/digits.csv");

/// Images with their labels.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Images {
    /// [`PIXELS`] values from 0 to 1 per image.
    pub pixels: Vec<f32>,
    /// The digit of every image.
    pub labels: Vec<u32>,
}

impl Images {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u32 {
        // CAST: a data set of this program is far below 2^32 images.
        self.labels.len() as u32
    }
}

/// A line of the data that is not what it should be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("digits.csv:{line}: {what}")]
pub struct BadLine {
    line: usize,
    what: String,
}

/// The training and the held-out images.
///
/// # Errors
/// The first line of the data that is not 64 pixels from 0 to 16 and a digit.
pub fn load() -> Result<(Images, Images), BadLine> {
    parse(CSV).map(|all| split(&all))
}

fn parse(csv: &str) -> Result<Images, BadLine> {
    let mut images = Images::default();
    for (at, line) in csv.lines().enumerate() {
        let bad = |what: String| BadLine { line: at + 1, what };
        let values: Vec<u32> = line
            .split(',')
            .map(|field| {
                field
                    .parse()
                    .map_err(|_| bad(format!("`{field}` is no number")))
            })
            .collect::<Result<_, _>>()?;
        let [pixels @ .., label] = values.as_slice() else {
            return Err(bad("an empty line".to_owned()));
        };
        if pixels.len() != PIXELS as usize {
            return Err(bad(format!("{} pixels instead of {PIXELS}", pixels.len())));
        }
        if let Some(pixel) = pixels.iter().find(|pixel| **pixel > 16) {
            return Err(bad(format!("pixel {pixel} is above 16")));
        }
        if *label >= CLASSES {
            return Err(bad(format!("{label} is no digit")));
        }
        // CAST: at most 16.
        images
            .pixels
            .extend(pixels.iter().map(|pixel| *pixel as f32 / 16.0));
        images.labels.push(*label);
    }
    Ok(images)
}

fn split(all: &Images) -> (Images, Images) {
    let order = Rng::new(SPLIT_SEED).permutation(all.count());
    let (held_out, training) = order.split_at(HELD_OUT.min(order.len()));
    (pick(all, training), pick(all, held_out))
}

fn pick(all: &Images, which: &[u32]) -> Images {
    let mut images = Images::default();
    let pixels: Vec<&[f32]> = all.pixels.chunks_exact(PIXELS as usize).collect();
    for at in which {
        // PANIC: `which` is part of a permutation of all images.
        images.pixels.extend_from_slice(pixels[*at as usize]);
        images.labels.push(all.labels[*at as usize]);
    }
    images
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_data_set_is_whole() {
        let all = parse(CSV).expect("the shipped data is sound");
        assert_eq!(all.count(), 1797);
        assert_eq!(all.pixels.len(), 1797 * 64);
        // The class counts that UCI's description gives for the test set.
        let counts: Vec<usize> = (0..10)
            .map(|digit| all.labels.iter().filter(|label| **label == digit).count())
            .collect();
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        assert!(all.pixels.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
    }

    #[test]
    fn the_split_is_fixed_and_disjoint() {
        let (training, held_out) = load().expect("the shipped data is sound");
        assert_eq!((training.count(), held_out.count()), (1437, 360));
        assert_eq!(load(), Ok((training.clone(), held_out.clone())));
        // Together the two have every image of the whole once.
        let images = |set: &Images| -> Vec<(Vec<u32>, u32)> {
            let rows = set
                .pixels
                .chunks_exact(64)
                .map(|row| row.iter().map(|pixel| (pixel * 16.0) as u32).collect());
            rows.zip(set.labels.iter().copied()).collect()
        };
        let mut both = images(&training);
        both.extend(images(&held_out));
        both.sort();
        let mut all = images(&parse(CSV).expect("the shipped data is sound"));
        all.sort();
        assert_eq!(both, all);
        assert!((0..10).all(|digit| held_out.labels.contains(&digit)));
    }

    #[test]
    fn bad_lines_are_named() {
        let good = CSV.lines().next().expect("there is a line");
        let message = |line: &str| {
            parse(&format!("{good}\n{line}"))
                .expect_err("the line is bad")
                .to_string()
        };
        assert_eq!(message("1,2"), "digits.csv:2: 1 pixels instead of 64");
        assert!(message(&good.replacen("0,", "17,", 1)).contains("pixel 17 is above 16"));
        assert!(message(&good.replacen("0,", "x,", 1)).contains("`x` is no number"));
        let (pixels, _) = good.rsplit_once(',').expect("a line has commas");
        assert!(message(&format!("{pixels},10")).contains("10 is no digit"));
    }
}
