//! What a request says: the part of the path that varies, parameters, and a body as JSON. Each is
//! taken whole or refused: a field or parameter that is not known is an error, since it may be one
//! that is known, misspelt.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::request::Parts;
use http_body_util::{BodyExt, Limited};
use policy::names::nearest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::conversation::{BODY_BYTES, Caller};
use super::problem::Problem;

/// Fields of a body that are looked at one by one where something is wrong with one of them.
const MOST_FIELDS: usize = 256;

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let caller = parts.extensions.get::<Self>().cloned();
        caller.ok_or_else(|| Problem::defect("nobody asks"))
    }
}

/// What stands in the path for the part that varies.
pub struct Varies(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Varies {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Self(text)),
            // No text.
            Err(_) => Err(Problem::nothing(format!(
                "there is nothing at {}; see /v1/openapi.json",
                parts.uri.path()
            ))),
        }
    }
}

/// The parameters after `?`.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match axum::extract::Query::<T>::try_from_uri(&parts.uri) {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(error) => {
                let why = std::error::Error::source(&error)
                    .map_or_else(|| error.to_string(), ToString::to_string);
                Err(Problem::malformed(format!("invalid parameter: {why}")))
            }
        }
    }
}

/// No parameters, and no body.
pub struct Plain;

impl<S: Send + Sync> FromRequest<S> for Plain {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        if let Some(query) = request.uri().query().filter(|query| !query.is_empty()) {
            return Err(Problem::malformed(format!(
                "no parameters are taken here, there is `{}`",
                shown(query)
            )));
        }
        let body = whole(request).await?;
        if body.iter().all(u8::is_ascii_whitespace) {
            Ok(Self)
        } else {
            Err(Problem::malformed("no body is taken here"))
        }
    }
}

/// A body as a JSON object.
pub struct Asked<T>(pub T);

impl<T: DeserializeOwned + Serialize, S: Send + Sync> FromRequest<S> for Asked<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        if let Some(query) = request.uri().query().filter(|query| !query.is_empty()) {
            return Err(Problem::malformed(format!(
                "no parameters are taken here, there is `{}`",
                shown(query)
            )));
        }
        read(&whole(request).await?).map(Self)
    }
}

async fn whole(request: Request) -> Result<Bytes, Problem> {
    let body = Limited::new(request.into_body(), BODY_BYTES);
    match body.collect().await {
        Ok(whole) => Ok(whole.to_bytes()),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Err(Problem::too_large(
            format!("the body is longer than {BODY_BYTES} bytes"),
        )),
        Err(error) => Err(Problem::malformed(format!("the body ends early: {error}"))),
    }
}

/// Text of others in an error.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

fn read<T: DeserializeOwned + Serialize>(body: &[u8]) -> Result<T, Problem> {
    let given: Value = serde_json::from_slice(body)
        .map_err(|error| Problem::malformed(format!("the body is no JSON: {error}")))?;
    let Value::Object(fields) = &given else {
        return Err(Problem::invalid("the body is no JSON object")
            .with_hint("write {\"field\": value}; see /v1/openapi.json"));
    };
    let taken: T = serde_json::from_slice(body).map_err(|error| {
        let field = wrong_field::<T>(fields)
            .map_or_else(String::new, |name| format!("`{}`: ", shown(&name)));
        // The place that serde names is of no use without line breaks.
        let why = error.to_string();
        let why = why.split(" at line ").next().unwrap_or_default();
        Problem::invalid(format!("{field}{}", shown_long(why)))
    })?;
    let back = serde_json::to_value(&taken)
        .map_err(|error| Problem::invalid(format!("invalid body: {error}")))?;
    match unknown(&given, &back, String::new()) {
        None => Ok(taken),
        Some((path, known)) => {
            let name = path.rsplit('.').next().unwrap_or_default();
            let near = nearest(&shown(name), known.iter().map(String::as_str));
            let hint = near.map_or_else(
                || format!("there are {}", known.join(", ")),
                |near| format!("is `{near}` meant?"),
            );
            let text = format!("there is no field `{}`", shown(&path));
            Err(Problem::invalid(text).with_hint(hint))
        }
    }
}

fn shown_long(text: &str) -> String {
    text.chars().take(300).collect()
}

/// The first field that is wrong by itself.
fn wrong_field<T: DeserializeOwned>(fields: &Map<String, Value>) -> Option<String> {
    // Of those in which every field may be left out: else each would be wrong by itself.
    T::deserialize(Value::Object(Map::new())).ok()?;
    let wrong = fields.iter().take(MOST_FIELDS).find(|(name, value)| {
        let single = Map::from_iter([((*name).clone(), (*value).clone())]);
        T::deserialize(Value::Object(single)).is_err()
    });
    wrong.map(|(name, _)| name.clone())
}

/// The path of the first field that was given and not taken, and the names that are known there.
/// Whatever is taken is written with all of its fields, so what is not among them was left out.
fn unknown(given: &Value, taken: &Value, path: String) -> Option<(String, Vec<String>)> {
    let below = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        }
    };
    match (given, taken) {
        (Value::Object(given), Value::Object(taken)) => {
            given
                .iter()
                .find_map(|(name, value)| match taken.get(name) {
                    Some(taken) => unknown(value, taken, below(name)),
                    None => Some((below(name), taken.keys().cloned().collect())),
                })
        }
        (Value::Array(given), Value::Array(taken)) => {
            let pairs = given.iter().zip(taken).enumerate();
            let mut pairs =
                pairs.map(|(at, (given, taken))| unknown(given, taken, below(&at.to_string())));
            pairs.find_map(|found| found)
        }
        // A list of values without their names.
        (Value::Array(_), Value::Object(taken)) => {
            Some((below("0"), taken.keys().cloned().collect()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use control::{Change, DeviceSettings, JobSpec, Moves, Settings};

    use super::*;

    fn refused<T: DeserializeOwned + Serialize>(body: &str) -> String {
        let Err(problem) = read::<T>(body.as_bytes()) else {
            panic!("taken: {body}");
        };
        serde_json::to_string(&problem).expect("an error")
    }

    #[test]
    fn fields_that_are_not_known_are_named_with_what_is_meant() {
        for (body, words) in [
            (r#"{"shar": 0.5}"#, ["`shar`", "`share` meant"]),
            (r#"{"resize": {"too": 2}}"#, ["`resize`", "unknown variant"]),
            (r#"{"colour": "blue"}"#, ["`colour`", "share_max"]),
        ] {
            let error = refused::<Change>(body);
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
        let error = refused::<JobSpec>(r#"{"own_file": {"given": {"mme": "1GiB"}}}"#);
        assert!(
            error.contains("own_file.given.mme") && error.contains("`mem` meant"),
            "{error}"
        );
        // The one "did you mean" of the workspace: `-` is `_`, and beginnings count.
        let error = refused::<Change>(r#"{"shares-max": 1}"#);
        assert!(error.contains("is `share_max` meant"), "{error}");
        let error = refused::<JobSpec>(r#"{"own_file": [1]}"#);
        assert!(error.contains("own_file"), "{error}");
        let error = refused::<DeviceSettings>(r#"{"policy": {"name": "stride", "x": 1}}"#);
        assert!(error.contains("policy.x"), "{error}");
    }

    #[test]
    fn values_of_the_wrong_kind_are_named_with_their_field() {
        for (body, field) in [
            (r#"{"share": "much"}"#, "`share`"),
            (r#"{"paused": 1}"#, "`paused`"),
            (r#"{"share": 0.5, "mem": 7}"#, "`mem`"),
            (r#"{"solo_iteration_us": -1}"#, "`solo_iteration_us`"),
            (r#"{"share": 1, "share": 2}"#, "duplicate"),
        ] {
            let error = refused::<Change>(body);
            assert!(error.contains(field), "{body}: {error}");
        }
        for body in [
            "",
            "{",
            "[]",
            "7",
            "null",
            "\"x\"",
            "{} {}",
            &"[".repeat(10_000),
        ] {
            let error = refused::<Moves>(body);
            assert!(error.contains("JSON"), "{body}: {error}");
        }
    }

    #[test]
    fn of_a_body_with_very_many_fields_the_first_are_looked_at() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        #[derive(Debug, Serialize)]
        struct Picky;
        impl<'de> serde::Deserialize<'de> for Picky {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                LOOKS.fetch_add(1, Ordering::Relaxed);
                let fields = Map::deserialize(from)?;
                match fields.contains_key("last") {
                    false => Ok(Self),
                    true => Err(serde::de::Error::custom("the last one")),
                }
            }
        }
        let fields: Vec<String> = (0..10_000).map(|at| format!("\"a{at}\": 1")).collect();
        let body = format!("{{{}, \"last\": 1}}", fields.join(", "));
        assert!(refused::<Picky>(&body).contains("the last one"));
        let looks = LOOKS.load(Ordering::Relaxed);
        assert!(looks <= MOST_FIELDS + 2, "{looks}");
    }

    #[test]
    fn every_setting_can_be_said() {
        let mut all = Map::new();
        for setting in control::JobSettings::TABLE {
            let text = setting.about.kind.example.replace(['"', '[', ']'], "");
            let one = (setting.parse)(&text).expect("an example");
            let Value::Object(one) = serde_json::to_value(&one).expect("JSON") else {
                panic!("no object");
            };
            all.extend(one.into_iter().filter(|(_, value)| !value.is_null()));
        }
        assert_eq!(all.len(), control::JobSettings::TABLE.len());
        let body = serde_json::to_vec(&Value::Object(all)).expect("JSON");
        read::<JobSpec>(&body).unwrap_or_else(|problem| panic!("{problem:?}"));
        read::<Change>(&body).unwrap_or_else(|problem| panic!("{problem:?}"));
    }
}
