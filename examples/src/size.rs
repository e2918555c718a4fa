//! Sizes in bytes as people write them.

/// Parses `512M`, `8GiB` and the like: 1024-based, whole numbers or fractions. A bare number is
/// refused: it is bytes to some and megabytes to others.
///
/// # Errors
/// A sentence that names the text and what is expected.
pub fn parse(text: &str) -> Result<u64, String> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "" => {
            return Err(format!(
                "`{text}` has no unit: write {text}MiB or {text}GiB, or 0B for nothing"
            ));
        }
        other => {
            return Err(format!(
                "`{other}` is no unit of size: use B, KiB, MiB, GiB or TiB"
            ));
        }
    };
    let number: f64 = number
        .parse()
        .map_err(|_| format!("`{text}` is no size: write for example 512MiB"))?;
    let bytes = number * f64::from(2u32).powi(shift);
    if bytes >= 2f64.powi(63) {
        return Err(format!("`{text}` is larger than any device"));
    }
    // CAST: positive and below 2^63.
    Ok(bytes as u64)
}

/// `bytes` with the largest unit that leaves at least one, for messages.
#[must_use]
pub fn show(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift > 0) {
        // CAST: a rounded number for people.
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_1024_based_and_required() {
        assert_eq!(parse("512M"), Ok(512 << 20));
        assert_eq!(parse("8GiB"), Ok(8 << 30));
        assert_eq!(parse("1.5k"), Ok(1536));
        assert_eq!(parse("0B"), Ok(0));
        for bad in ["", "12", "GiB", "1.2.3M", "-1M", "5 parsecs", "99999999T"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse("12").is_err_and(|hint| hint.contains("12MiB")));
    }

    #[test]
    fn shown_sizes_have_a_unit() {
        assert_eq!(show(0), "0 B");
        assert_eq!(show(1536), "1.5 KiB");
        assert_eq!(show(20 << 30), "20.0 GiB");
    }
}
