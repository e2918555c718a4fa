//! Kubernetes' way of writing amounts: `30Gi`, `40500Mi`, `100`, `500m`, `2e3`.

use std::fmt;

/// An amount in thousandths, as exact as the text was, rounded up to one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Quantity {
    thousandths: u128,
}

/// A text that is no amount.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{0}` is no amount: write a number such as 30Gi, 512Mi or 40")]
pub struct NotAQuantity(String);

/// Longest text that is read as one.
const LONGEST: usize = 40;

/// Suffixes, and what they multiply by, in thousandths.
const SUFFIXES: [(&str, u128); 13] = [
    ("Ki", 1000 << 10),
    ("Mi", 1000 << 20),
    ("Gi", 1000 << 30),
    ("Ti", 1000 << 40),
    ("Pi", 1000 << 50),
    ("Ei", 1000 << 60),
    ("m", 1),
    ("k", 1_000_000),
    ("M", 1_000_000_000),
    ("G", 1_000_000_000_000),
    ("T", 1_000_000_000_000_000),
    ("P", 1_000_000_000_000_000_000),
    ("E", 1_000_000_000_000_000_000_000),
];

impl Quantity {
    /// Reads a text.
    ///
    /// # Errors
    /// [`NotAQuantity`]: negative ones too, since nothing here can be negative.
    pub fn parse(text: &str) -> Result<Self, NotAQuantity> {
        let wrong = || NotAQuantity(text.chars().take(LONGEST).collect());
        if text.len() > LONGEST {
            return Err(wrong());
        }
        let at = text.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, suffix) = text.split_at(at.unwrap_or(text.len()));
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
            return Err(wrong());
        }
        let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| wrong())?;
        let places = u32::try_from(fraction.len()).map_err(|_| wrong())?;
        let (unit, divisor) = match suffix {
            "" => (1000, 1),
            // Below a thousandth: rounded up to one, as everything is.
            "u" => (1, 1000),
            "n" => (1, 1_000_000),
            _ => match suffix.strip_prefix(['e', 'E']).filter(|e| !e.is_empty()) {
                Some(exponent) if suffix != "Ei" => {
                    let exponent: i32 = exponent.parse().map_err(|_| wrong())?;
                    let power = 10_u128
                        .checked_pow(exponent.unsigned_abs())
                        .ok_or_else(wrong)?;
                    match exponent {
                        0.. => (power.checked_mul(1000).ok_or_else(wrong)?, 1),
                        _ => (1000, power),
                    }
                }
                _ => {
                    let known = SUFFIXES.iter().find(|(name, _)| *name == suffix);
                    (known.ok_or_else(wrong)?.1, 1)
                }
            },
        };
        let divisor = 10_u128
            .checked_pow(places)
            .and_then(|power| power.checked_mul(divisor));
        let product = digits.checked_mul(unit).ok_or_else(wrong)?;
        let thousandths = product.div_ceil(divisor.ok_or_else(wrong)?);
        Ok(Self { thousandths })
    }

    /// So many bytes, rounded up; `None`: more than 64 bits hold.
    pub fn bytes(self) -> Option<u64> {
        u64::try_from(self.thousandths.div_ceil(1000)).ok()
    }

    /// As a number.
    pub fn number(self) -> f64 {
        // CAST: the nearest number is good enough for a share.
        self.thousandths as f64 / 1000.0
    }
}

/// An amount of bytes in the largest unit that writes it without a fraction.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
        match units
            .iter()
            .find(|(shift, _)| self.0 != 0 && self.0.trailing_zeros() >= *shift)
        {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(text: &str) -> Option<u64> {
        Quantity::parse(text).unwrap().bytes()
    }

    #[test]
    fn amounts_are_read_as_kubernetes_writes_them() {
        for (text, expected) in [
            ("0", 0),
            ("100", 100),
            ("30Gi", 30 << 30),
            ("40500Mi", 40500 << 20),
            ("1.5Gi", 3 << 29),
            (".5Ki", 512),
            ("2e3", 2000),
            ("2E3", 2000),
            ("25e-1", 3),
            ("1500m", 2),
            ("1n", 1),
            ("3k", 3000),
            ("1Ei", 1 << 60),
            ("1E", 1_000_000_000_000_000_000),
        ] {
            assert_eq!(bytes(text), Some(expected), "{text}");
        }
        assert_eq!(bytes("16Ei"), None, "more than 64 bits");
        assert!((Quantity::parse("40").unwrap().number() - 40.0).abs() < 1e-9);
    }

    #[test]
    fn nonsense_is_no_amount() {
        let long = "1".repeat(500);
        for text in [
            "",
            "-1",
            "+1",
            "Gi",
            "1 Gi",
            "1.2.3",
            "1gi",
            "1e",
            "1e99",
            "1Zi",
            "NaN",
            "١Gi",
            ".",
            long.as_str(),
        ] {
            let error = Quantity::parse(text).unwrap_err().to_string();
            assert!(
                error.contains("is no amount") && error.len() < 200,
                "{error}"
            );
        }
    }

    #[test]
    fn bytes_are_written_without_a_fraction() {
        for (bytes, text) in [
            (0, "0"),
            (1 << 30, "1Gi"),
            (3 << 29, "1536Mi"),
            (1025, "1025"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
    }
}
