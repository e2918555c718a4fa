//! As much of JSON as the scenarios need.

use std::collections::BTreeMap;

#[derive(Clone, Debug)]
pub enum Json {
    Null,
    Flag(bool),
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl Json {
    pub fn parse(text: &str) -> Self {
        let mut rest = text;
        let value = value(&mut rest);
        assert!(rest.trim().is_empty(), "something follows the value");
        value
    }

    pub fn get(&self, key: &str) -> &Self {
        match self {
            Self::Object(of) => of.get(key).unwrap_or(&Self::Null),
            other => panic!("{key} of {other:?}"),
        }
    }

    pub fn list(&self) -> &[Self] {
        match self {
            Self::List(of) => of,
            Self::Null => &[],
            other => panic!("not a list: {other:?}"),
        }
    }

    pub fn text(&self) -> &str {
        match self {
            Self::Text(of) => of,
            other => panic!("not a text: {other:?}"),
        }
    }

    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Number(of) => Some(*of),
            _ => None,
        }
    }

    pub fn is_true(&self) -> bool {
        matches!(self, Self::Flag(true))
    }
}

fn token(rest: &mut &str, expected: &str) -> bool {
    *rest = rest.trim_start();
    let found = rest.strip_prefix(expected);
    *rest = found.unwrap_or(rest);
    found.is_some()
}

fn text(rest: &mut &str) -> String {
    let end = rest.find('"').expect("a closing quote");
    let found = &rest[..end];
    assert!(!found.contains('\\'), "escapes are not read: {found}");
    *rest = &rest[end + 1..];
    found.to_owned()
}

fn value(rest: &mut &str) -> Json {
    for (word, meaning) in [
        ("null", Json::Null),
        ("true", Json::Flag(true)),
        ("false", Json::Flag(false)),
    ] {
        if token(rest, word) {
            return meaning;
        }
    }
    if token(rest, "\"") {
        return Json::Text(text(rest));
    }
    if token(rest, "[") {
        let mut list = Vec::new();
        while !token(rest, "]") {
            list.push(value(rest));
            token(rest, ",");
        }
        return Json::List(list);
    }
    if token(rest, "{") {
        let mut object = BTreeMap::new();
        while !token(rest, "}") {
            assert!(token(rest, "\""), "a key");
            let key = text(rest);
            assert!(token(rest, ":"), "a colon after {key}");
            object.insert(key, value(rest));
            token(rest, ",");
        }
        return Json::Object(object);
    }
    let numeric = |c: char| !(c.is_ascii_digit() || "+-.eE".contains(c));
    let end = rest.find(numeric).unwrap_or(rest.len());
    let number = rest[..end].parse().expect("a number");
    *rest = &rest[end..];
    Json::Number(number)
}
