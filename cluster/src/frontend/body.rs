//! Bodies: a request's, which is read whole, and an answer's, which is passed on as it comes.

use std::io;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};

use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::StatusCode;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::hall::{Hall, UnderWay};
use super::proxy::{Answer, ours};
use super::stream::PATIENCE;

/// Bytes of a body that are held.
pub struct Held<'a> {
    hall: &'a Hall,
    bytes: usize,
}

impl<'a> Held<'a> {
    /// None yet.
    pub fn new(hall: &'a Hall) -> Self {
        Self { hall, bytes: 0 }
    }

    /// More of it, where there is space.
    fn grow(&mut self, bytes: usize) -> bool {
        let most = self.hall.shared.options.bodies_bytes;
        // SYNC(count): a count and nothing else; no data is published by it.
        let before = self.hall.held.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        before.saturating_add(bytes) <= most
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SYNC(count): as above.
        self.hall.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The body of a request, whole.
pub async fn read(mut body: Incoming, held: &mut Held<'_>) -> Result<Bytes, Answer> {
    let most = held.hall.shared.options.body_bytes;
    let too_large = || {
        let why = format!("a body of more than {most} bytes (--max-body)");
        ours(StatusCode::PAYLOAD_TOO_LARGE, &why)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let mut whole = Vec::new();
    let reading = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                ours(
                    StatusCode::BAD_REQUEST,
                    &format!("the body broke off: {error}"),
                )
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if whole.len() + data.len() > most {
                return Err(too_large());
            }
            if !held.grow(data.len()) {
                let why = "it holds as many bytes of requests as it may; try again";
                return Err(ours(StatusCode::SERVICE_UNAVAILABLE, why));
            }
            whole.extend_from_slice(&data);
        }
        Ok(())
    };
    match timeout(PATIENCE, reading).await {
        Ok(Ok(())) => Ok(Bytes::from(whole)),
        Ok(Err(answer)) => Err(answer),
        Err(_) => {
            let why = format!("the body did not come within {} s", PATIENCE.as_secs());
            Err(ours(StatusCode::REQUEST_TIMEOUT, &why))
        }
    }
}

/// A body whose frames come from elsewhere.
pub struct Streamed {
    /// Where from.
    pub coming: mpsc::Receiver<Result<Frame<Bytes>, io::Error>>,
    /// How long it is.
    pub length: SizeHint,
}

impl Body for Streamed {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.coming.poll_recv(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.length
    }
}

/// A body with what is to stay as long as it.
pub struct Kept {
    body: UnsyncBoxBody<Bytes, io::Error>,
    _under_way: UnderWay,
}

impl Kept {
    /// As long as the body, a request is under way.
    pub fn new(body: UnsyncBoxBody<Bytes, io::Error>, under_way: UnderWay) -> Self {
        Self {
            body,
            _under_way: under_way,
        }
    }
}

impl Body for Kept {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
