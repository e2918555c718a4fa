//! A short list on the stack: a decision names one or two tenants and must not allocate.

use std::fmt;
use std::ops::Deref;

/// How many fit without an allocation.
const INLINE: usize = 4;

/// A list of copies; up to four need no allocation.
#[derive(Clone, Default)]
pub struct Few<T> {
    inline: [T; INLINE],
    len: usize,
    /// All of them, once there are more than four.
    more: Vec<T>,
}

impl<T: Copy + Default> Few<T> {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one at the end.
    pub fn push(&mut self, item: T) {
        if self.len < INLINE {
            self.inline[self.len] = item;
        } else {
            if self.len == INLINE {
                self.more.clear();
                self.more.extend_from_slice(&self.inline);
            }
            self.more.push(item);
        }
        self.len += 1;
    }

    /// Takes all of them out; what was allocated is kept.
    pub fn clear(&mut self) {
        self.len = 0;
        self.more.clear();
    }
}

impl<T> Deref for Few<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        if self.len <= INLINE {
            &self.inline[..self.len]
        } else {
            &self.more
        }
    }
}

impl<T: Copy + Default> FromIterator<T> for Few<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        let mut few = Self::new();
        for item in items {
            few.push(item);
        }
        few
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl<T: PartialEq> PartialEq for Few<T> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl<T: Eq> Eq for Few<T> {}

impl<T: fmt::Debug> fmt::Debug for Few<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reads_like_a_vector_at_every_length() {
        let mut few = Few::new();
        let mut vector = Vec::new();
        for round in 0..2 {
            for item in 0..20 {
                few.push(item + round);
                vector.push(item + round);
                assert_eq!(&*few, &vector[..]);
            }
            few.clear();
            vector.clear();
            assert!(few.is_empty());
        }
    }

    #[test]
    fn equality_looks_at_what_is_in_it_only() {
        let mut one: Few<u8> = [1, 2, 3].into_iter().collect();
        one.clear();
        one.push(7);
        assert_eq!(one, [7].into_iter().collect());
        assert_ne!(one, Few::new());
    }
}
