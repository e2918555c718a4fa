//! Traces of requests to a service: when each came, and how long it takes.
//!
//! A file has `arrival_s` and either `service_s`, or `context_tokens` and `generated_tokens`, which
//! become seconds by what a token costs. Rows may come in any order.

use std::path::Path;

use super::table::{Table, TraceError};

/// What a token costs a model that answers one request at a time, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TokenCost {
    /// Of the question.
    pub context_s: f64,
    /// Of the answer.
    pub generated_s: f64,
}

/// A request.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Request {
    /// When it comes, from the beginning of the trace.
    pub arrival_s: f64,
    /// How long an instance takes that does nothing else.
    pub service_s: f64,
}

/// Longest request that is believed: 10 days.
const LONGEST_S: f64 = 864_000.0;

/// Reads the requests of a file, by arrival.
///
/// # Errors
/// [`TraceError`]: the file cannot be read, lacks a column, has a bad field or no request.
pub fn read_requests(path: &Path, cost: TokenCost) -> Result<Vec<Request>, TraceError> {
    const EXPECTED: &str = "seconds up to 10 days are expected";
    let table = Table::open(path)?;
    let arrival = table.column("arrival_s")?;
    let service = table.optional("service_s");
    let tokens = match service {
        Some(_) => None,
        None => Some((
            table.column("context_tokens")?,
            table.column("generated_tokens")?,
        )),
    };
    let mut requests = Vec::new();
    table.each(|row| {
        let arrival_s = row.number(arrival)?;
        let (service_s, at) = match (service, tokens) {
            (Some(column), _) => (row.number(column)?, column),
            (None, Some((context, generated))) => {
                let context_s = cost.context_s * row.number(context)?;
                let generated_s = cost.generated_s * row.number(generated)?;
                (context_s + generated_s, generated)
            }
            (None, None) => (0.0, arrival),
        };
        if arrival_s > LONGEST_S {
            return Err(row.wrong(arrival, EXPECTED));
        }
        if service_s > LONGEST_S {
            return Err(row.wrong(at, EXPECTED));
        }
        requests.push(Request {
            arrival_s,
            service_s,
        });
        Ok(())
    })?;
    requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
    if requests.is_empty() {
        return Err(TraceError::NoRequest {
            file: path.to_owned(),
        });
    }
    Ok(requests)
}
