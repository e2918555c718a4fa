//! An event as people and as programs read it: one line.

use control::{Event, EventKind};
use serde_json::{Value, json};

use crate::printable::printable;
use crate::when;

/// Columns of what people read: a kind in plain words, and the job's name.
const KIND: usize = 18;
const JOB: usize = 12;

/// An event of a line; `None`: it is none.
pub fn parse(line: &[u8]) -> Option<Event> {
    let event: Event = serde_json::from_slice(line).ok()?;
    // Everything has a default, so that older and newer arbiters are understood; these have none.
    let is_one = event.seq > 0 && !event.kind.is_empty() && when::rfc3339(event.unix_ms).is_some();
    is_one.then_some(event)
}

/// Time, kind, job, message.
pub fn text(event: &Event) -> String {
    let time = when::rfc3339(event.unix_ms).unwrap_or_default();
    let kind = match EventKind::of(&event.kind) {
        Some(kind) => kind.plain.to_owned(),
        // Of a newer arbiter.
        None => printable(&event.kind.replace('_', " ")),
    };
    let job = match event.job.as_str() {
        "" => "-".to_owned(),
        job => printable(job),
    };
    let message = printable(&event.message);
    format!("{time}  {kind:KIND$}  {job:JOB$}  {message}\n")
}

/// One JSON object. Names do not change; new ones may come.
pub fn json(event: &Event) -> String {
    let or_null = |is_there: bool, value: Value| if is_there { value } else { Value::Null };
    crate::json::object(json!({
        "seq": event.seq,
        "time": when::rfc3339(event.unix_ms),
        "unix_ms": event.unix_ms,
        "kind": event.kind,
        "job": or_null(!event.job.is_empty(), event.job.as_str().into()),
        "job_id": or_null(event.job_id != 0, event.job_id.into()),
        "message": event.message,
        "fields": event.fields,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Event {
        parse(
            br#"{"seq":3,"unix_ms":1795466100123,"kind":"oom","job":"train","job_id":7,
                "message":"job `train` is out of memory","fields":{"device":0},"newer":[1]}"#,
        )
        .unwrap()
    }

    #[test]
    fn people_read_time_kind_job_and_message() {
        let mut event = event();
        assert_eq!(
            text(&event),
            "2026-11-23T20:35:00.123Z  out of memory       train         job `train` is out of memory\n"
        );
        event.kind = "hibernated_again".into();
        event.job.clear();
        assert_eq!(
            text(&event),
            "2026-11-23T20:35:00.123Z  hibernated again    -             job `train` is out of memory\n",
            "a kind of a newer arbiter is shown by its own words"
        );
    }

    #[test]
    fn programs_read_names_that_stay() {
        let mut event = event();
        let expected = json!({
            "schema": 1, "seq": 3, "time": "2026-11-23T20:35:00.123Z", "unix_ms": 1795466100123_u64,
            "kind": "oom", "job": "train", "job_id": 7, "message": "job `train` is out of memory",
            "fields": { "device": 0 },
        });
        let read = |event: &Event| -> Value { serde_json::from_str(&json(event)).unwrap() };
        assert_eq!(read(&event), expected);
        (event.job, event.job_id) = (String::new(), 0);
        assert_eq!(read(&event)["job"], Value::Null);
        assert_eq!(read(&event)["job_id"], Value::Null);
        event.message = "two\nlines".into();
        assert_eq!(json(&event).lines().count(), 1);
    }

    #[test]
    fn nothing_of_a_message_ends_the_line_or_reaches_the_terminal() {
        let mut event = event();
        event.message = "a\nb\x1b[2Jc\r\u{9b}d\u{202e}e\u{2028}\tf ü 漢".into();
        event.kind = "x\n".into();
        event.job = "\x07".into();
        let shown = text(&event);
        assert!(
            shown.ends_with(" a\\nb\\u{1b}[2Jc\\r\\u{9b}d\\u{202e}e\\u{2028}\\tf ü 漢\n"),
            "{shown}"
        );
        assert_eq!(shown.chars().filter(|char| char.is_control()).count(), 1);
    }

    #[test]
    fn what_lacks_number_kind_or_time_is_no_event() {
        for line in [
            "",
            "{}",
            "[]",
            "7",
            "{\"seq\":1",
            r#"{"seq":1,"unix_ms":1}"#,
            r#"{"seq":0,"unix_ms":1,"kind":"oom"}"#,
            r#"{"seq":"1","unix_ms":1,"kind":"oom"}"#,
            r#"{"seq":1,"unix_ms":18446744073709551615,"kind":"oom"}"#,
            "\u{0}\u{0}\u{0}",
        ] {
            assert_eq!(parse(line.as_bytes()), None, "{line}");
        }
        assert_eq!(parse(b"{\"seq\":1,\"kind\":\"\xff\"}"), None);
        let least = parse(br#"{"seq":1,"unix_ms":1,"kind":"oom"}"#).unwrap();
        assert!(text(&least).contains("out of memory"));
    }
}
