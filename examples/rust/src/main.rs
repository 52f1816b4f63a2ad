//! What an application does with octavo, in Rust: make run ENDPOINTS=127.0.0.1:50051,127.0.0.1:50052
//! Each part below prints one line at its end. ../../README.md says what the lines mean.
//!
//! Debian has no tonic. The module `grpc` stands in its place: calls over the crate `h2`. With tonic, delete that module
//! and use its `Channel`, `Status` and the client that tonic-build generates; `follow` and `explain` stay as they are.
use prost::Message;
use prost_types::Any;
use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::{BuildHasher, Hasher};
use std::io::Write;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::Instant;

pub mod octavo {
    include!(concat!(env!("OUT_DIR"), "/octavo.v1.rs"));
}
mod rpc {
    include!(concat!(env!("OUT_DIR"), "/google.rpc.rs"));
}
mod health_v1 {
    include!(concat!(env!("OUT_DIR"), "/grpc.health.v1.rs"));
}

mod grpc {
    //! Unary calls and streams of gRPC over HTTP/2, without TLS and compression.
    use super::*;
    use bytes::{Buf, Bytes, BytesMut};
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Code(pub usize);
    pub const OK: Code = Code(0);
    pub const CANCELLED: Code = Code(1);
    pub const UNKNOWN: Code = Code(2);
    pub const DEADLINE_EXCEEDED: Code = Code(4);
    pub const RESOURCE_EXHAUSTED: Code = Code(8);
    pub const UNIMPLEMENTED: Code = Code(12);
    pub const INTERNAL: Code = Code(13);
    pub const UNAVAILABLE: Code = Code(14);
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];

    impl Code {
        pub fn name(self) -> &'static str {
            NAMES.get(self.0).copied().unwrap_or("UNKNOWN")
        }
    }

    #[derive(Debug)]
    pub struct Status {
        pub code: Code,
        pub message: String,
        pub details: Vec<u8>, // of grpc-status-details-bin
    }

    impl Status {
        pub fn new(code: Code, message: impl ToString) -> Self {
            Self { code, message: message.to_string(), details: Vec::new() }
        }

        /// The status in trailers, or in the headers of an answer that has nothing else.
        fn from_trailers(trailers: &http::HeaderMap) -> Option<Self> {
            let text = |name| trailers.get(name).map(|value| value.as_bytes());
            let code = std::str::from_utf8(text("grpc-status")?).ok()?.parse().unwrap_or(UNKNOWN.0);
            let message =
                String::from_utf8_lossy(&percent_decoded(text("grpc-message").unwrap_or_default())).into_owned();
            Some(Self {
                code: Code(code),
                message,
                details: base64_decoded(text("grpc-status-details-bin").unwrap_or_default()),
            })
        }
    }

    impl From<h2::Error> for Status {
        fn from(error: h2::Error) -> Self {
            let code = match error.reason() {
                _ if error.is_go_away() || error.is_io() => UNAVAILABLE,
                Some(h2::Reason::CANCEL) => CANCELLED,
                Some(h2::Reason::REFUSED_STREAM) => UNAVAILABLE,
                Some(h2::Reason::ENHANCE_YOUR_CALM) => RESOURCE_EXHAUSTED,
                Some(_) => INTERNAL,
                None => UNAVAILABLE,
            };
            Self::new(code, error)
        }
    }

    fn percent_decoded(text: &[u8]) -> Vec<u8> {
        let mut found = Vec::with_capacity(text.len());
        let mut at = 0;
        while at < text.len() {
            let digits = text.get(at + 1..at + 3).and_then(|digits| std::str::from_utf8(digits).ok());
            match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
                Some(byte) if text[at] == b'%' => {
                    found.push(byte);
                    at += 3;
                }
                _ => {
                    found.push(text[at]);
                    at += 1;
                }
            }
        }
        found
    }

    fn base64_decoded(text: &[u8]) -> Vec<u8> {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let (mut found, mut bits, mut held) = (Vec::new(), 0u32, 0);
        for digit in text.iter().filter_map(|it| DIGITS.iter().position(|digit| digit == it)) {
            bits = bits << 6 | digit as u32;
            held += 6;
            if held >= 8 {
                held -= 8;
                found.push((bits >> held) as u8);
            }
        }
        found
    }

    struct Connection {
        requests: h2::client::SendRequest<Bytes>,
        driver: Arc<tokio::task::JoinHandle<Result<(), h2::Error>>>,
    }

    /// A connection to one router, made when it is needed and made again when it has broken.
    pub struct Channel {
        pub endpoint: String,
        connection: Mutex<Option<Connection>>,
    }

    impl Channel {
        pub fn new(endpoint: &str) -> Self {
            Self { endpoint: endpoint.to_owned(), connection: Mutex::new(None) }
        }

        async fn requests(&self) -> Result<h2::client::SendRequest<Bytes>, Status> {
            if let Some(connection) = &*self.connection.lock().unwrap() {
                if !connection.driver.is_finished() {
                    return Ok(connection.requests.clone());
                }
            }
            let refused = |error| Status::new(UNAVAILABLE, format!("{}: {error}", self.endpoint));
            let socket = tokio::net::TcpStream::connect(&self.endpoint).await.map_err(refused)?;
            socket.set_nodelay(true).map_err(refused)?;
            let (requests, mut transport) = h2::client::handshake(socket).await?;
            let pings = transport.ping_pong();
            let driver = Arc::new(tokio::spawn(transport));
            let handle = driver.clone();
            tokio::spawn(async move {
                // Pings notice a router that vanished without a word: to drop the transport ends its streams.
                if let Some(pings) = pings {
                    keep_alive(pings).await;
                    handle.abort();
                }
            });
            *self.connection.lock().unwrap() = Some(Connection { requests: requests.clone(), driver });
            Ok(requests)
        }

        /// Begins a call. `attempt` counts those that gRPC has made of this call before.
        async fn begin<Q: Message>(
            &self,
            path: &str,
            request: &Q,
            deadline: Option<Instant>,
            attempt: u32,
        ) -> Result<h2::RecvStream, Status> {
            let mut head = http::Request::post(format!("http://{}{path}", self.endpoint))
                .header("te", "trailers")
                .header("content-type", "application/grpc");
            if let Some(deadline) = deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                head = head.header("grpc-timeout", format!("{}m", left.as_millis().max(1)));
            }
            if attempt > 0 {
                head = head.header("grpc-previous-rpc-attempts", attempt);
            }
            let head = head.body(()).map_err(|error| Status::new(INTERNAL, error))?;
            let mut requests = self.requests().await?.ready().await?;
            let (answer, mut body) = requests.send_request(head, false)?;
            let mut frame = vec![0];
            frame.extend((request.encoded_len() as u32).to_be_bytes());
            frame.extend(request.encode_to_vec());
            body.send_data(frame.into(), true)?;
            let (head, body) = answer.await?.into_parts();
            if let Some(status) = Status::from_trailers(&head.headers) {
                return Err(status);
            }
            match head.status.as_u16() {
                200 => Ok(body),
                429 | 502 | 503 | 504 => Err(Status::new(UNAVAILABLE, head.status)),
                404 => Err(Status::new(UNIMPLEMENTED, head.status)),
                _ => Err(Status::new(UNKNOWN, head.status)),
            }
        }

        /// A call with one answer, repeated as protos/service_config.json says for Generate and Complete.
        pub async fn unary<Q: Message, A: Message + Default>(&self, path: &str, request: &Q) -> Result<A, Status> {
            for attempt in 0.. {
                let answer = match self.begin(path, request, None, attempt).await {
                    Ok(body) => Streaming { body, buffer: BytesMut::new(), deadline: None }.message().await,
                    Err(status) => Err(status),
                };
                match answer {
                    Err(status) if status.code == RESOURCE_EXHAUSTED && attempt < 3 => {
                        tokio::time::sleep(Duration::from_millis(super::random() % (100 << attempt))).await
                    }
                    Err(status) => return Err(status),
                    Ok(answer) => return answer.ok_or_else(|| Status::new(INTERNAL, "an answer without a message")),
                }
            }
            unreachable!()
        }

        /// A call whose answers come one by one. To drop the stream cancels the call.
        pub async fn streaming<Q: Message>(
            &self,
            path: &str,
            request: &Q,
            deadline: Option<Instant>,
        ) -> Result<Streaming, Status> {
            let body = within(deadline, self.begin(path, request, deadline, 0)).await?;
            Ok(Streaming { body, buffer: BytesMut::new(), deadline })
        }
    }

    /// The answers of a call.
    pub struct Streaming {
        body: h2::RecvStream,
        buffer: BytesMut,
        deadline: Option<Instant>,
    }

    impl Streaming {
        /// The next answer, or None where the call has ended with OK.
        pub async fn message<A: Message + Default>(&mut self) -> Result<Option<A>, Status> {
            within(self.deadline, self.next()).await
        }

        async fn next<A: Message + Default>(&mut self) -> Result<Option<A>, Status> {
            loop {
                if self.buffer.len() >= 5 {
                    let size =
                        u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
                    if self.buffer.len() >= 5 + size {
                        self.buffer.advance(5);
                        let message = A::decode(self.buffer.split_to(size));
                        return message.map(Some).map_err(|error| Status::new(INTERNAL, error));
                    }
                }
                match self.body.data().await {
                    Some(data) => {
                        let data = data?;
                        self.body.flow_control().release_capacity(data.len())?;
                        self.buffer.extend_from_slice(&data);
                    }
                    None => {
                        let trailers = self.body.trailers().await?.unwrap_or_default();
                        let nothing = || Status::new(UNKNOWN, "the stream has ended without a status");
                        let status = Status::from_trailers(&trailers).unwrap_or_else(nothing);
                        return if status.code == OK { Ok(None) } else { Err(status) };
                    }
                }
            }
        }
    }

    async fn within<T>(deadline: Option<Instant>, work: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        match deadline {
            None => work.await,
            Some(deadline) => tokio::time::timeout_at(deadline, work)
                .await
                .unwrap_or_else(|_| Err(Status::new(DEADLINE_EXCEEDED, "the deadline has passed"))),
        }
    }

    /// Returns when a ping has not been answered for two seconds.
    async fn keep_alive(mut pings: h2::PingPong) {
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let answer = pings.ping(h2::Ping::opaque());
            if !matches!(tokio::time::timeout(Duration::from_secs(2), answer).await, Ok(Ok(_))) {
                return;
            }
        }
    }
}

use grpc::{Channel, Code, Status};

const MAX_FAILURES: u32 = 600; // without an event between them; with the pauses after them about five minutes
const GENERATE: &str = "/octavo.v1.Inference/Generate";
const ATTACH: &str = "/octavo.v1.Inference/Attach";
const COMPLETE: &str = "/octavo.v1.Inference/Complete";
const CANCEL: &str = "/octavo.v1.Inference/Cancel";
const CHECK: &str = "/grpc.health.v1.Health/Check";

fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// A request for `max_tokens` tokens. It has an id of its own, so that it can be sent twice and runs once.
fn new_request(text: &str, max_tokens: u32) -> octavo::GenerateRequest {
    octavo::GenerateRequest {
        request_id: Some(format!("rust-{:016x}{:016x}", random(), random())),
        input: Some(octavo::generate_request::Input::Text(text.to_owned())),
        sampling: Some(octavo::SamplingParams {
            temperature: Some(0.0),
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// What octavo says of a failed call: the details of google.rpc.Status, if there are any.
struct Explanation {
    code: Code,
    reason: String, // empty: no router said this; the connection broke, or a proxy answered
    fields: Vec<String>,
    retry: Duration,
}

fn unpack<M: Message + Default>(detail: &Any, name: &str) -> Option<M> {
    let named = detail.type_url.ends_with(&format!("/google.rpc.{name}"));
    if named {
        M::decode(detail.value.as_slice()).ok()
    } else {
        None
    }
}

fn explain(status: &Status) -> Explanation {
    let mut told = Explanation { code: status.code, reason: String::new(), fields: Vec::new(), retry: Duration::ZERO };
    for detail in rpc::Status::decode(status.details.as_slice()).unwrap_or_default().details {
        if let Some(info) = unpack::<rpc::ErrorInfo>(&detail, "ErrorInfo") {
            told.reason = info.reason;
        } else if let Some(bad) = unpack::<rpc::BadRequest>(&detail, "BadRequest") {
            told.fields = bad.field_violations.into_iter().map(|violation| violation.field).collect();
        } else if let Some(retry) = unpack::<rpc::RetryInfo>(&detail, "RetryInfo") {
            told.retry = retry.retry_delay.and_then(|delay| Duration::try_from(delay).ok()).unwrap_or_default();
        }
    }
    told
}

/// Whether another router may go on with the stream: this one is gone, is going, or has no room for it.
fn elsewhere(told: &Explanation) -> bool {
    let codes: &[Code] = if told.reason.is_empty() {
        &[grpc::UNAVAILABLE, grpc::INTERNAL, grpc::UNKNOWN, grpc::CANCELLED]
    } else {
        &[grpc::UNAVAILABLE, grpc::RESOURCE_EXHAUSTED]
    };
    codes.contains(&told.code)
}

/// Every event of a request, once and in order, over as many routers as it takes.
struct Follower<'a> {
    routers: &'a [Channel],
    request: octavo::GenerateRequest,
    deadline: Option<Instant>,
    stream: Option<grpc::Streaming>,
    place: Option<octavo::AttachRequest>, // after the last event that was handed out
    next_index: u32,
    failures: u32, // since that event
    attempt: usize,
    attached: u32,
    status: Code, // how the connection before ended
    finished: bool,
}

fn follow(routers: &[Channel], request: octavo::GenerateRequest, deadline: Option<Instant>) -> Follower<'_> {
    let (stream, place, status, finished) = (None, None, grpc::OK, false);
    let (next_index, failures, attempt, attached) = (0, 0, 0, 0);
    Follower { routers, request, deadline, stream, place, next_index, failures, attempt, attached, status, finished }
}

impl Follower<'_> {
    async fn next(&mut self) -> Result<Option<octavo::GenerateEvent>, Status> {
        while !self.finished {
            let failed = match self.read().await {
                Ok(Some(event)) => {
                    let at = Some(octavo::attach_request::At::ResumeToken(event.resume_token.clone()));
                    self.place = Some(octavo::AttachRequest { at, ..Default::default() });
                    self.next_index = event.first_index + event.token_ids.len() as u32;
                    self.failures = 0;
                    self.finished = event.finished.is_some();
                    return Ok(Some(event));
                }
                Ok(None) => Status::new(grpc::OK, ""), // an end without `finished` is none
                Err(status) => status,
            };
            self.stream = None;
            let told = explain(&failed);
            if told.code == grpc::DEADLINE_EXCEEDED && self.place.is_some() && self.deadline.is_some() {
                self.deadline = None; // the call has ended with the request: fetch its last tokens
            } else if told.reason == "FOREIGN_TOKEN" {
                // The store was lost, and the key of tokens with it.
                let at = self.request.request_id.clone().map(octavo::attach_request::At::RequestId);
                self.place = Some(octavo::AttachRequest { at, next_indexes: vec![self.next_index] });
            } else if told.code != grpc::OK && (!elsewhere(&told) || self.failures > MAX_FAILURES) {
                return Err(failed);
            }
            self.status = told.code;
            let bound = (50 << self.failures.min(10)).min(1000);
            tokio::time::sleep(told.retry + Duration::from_millis(random() % bound)).await;
            self.failures += 1;
            self.attempt += 1;
            self.attached += u32::from(self.place.is_some());
        }
        Ok(None)
    }

    async fn read(&mut self) -> Result<Option<octavo::GenerateEvent>, Status> {
        if self.stream.is_none() {
            let router = &self.routers[self.attempt % self.routers.len()];
            self.stream = Some(match &self.place {
                None => router.streaming(GENERATE, &self.request, self.deadline).await?,
                Some(place) => router.streaming(ATTACH, place, self.deadline).await?,
            });
        }
        self.stream.as_mut().expect("a stream has begun").message().await
    }
}

/// It grows. Each token has an index: a lost one or a double one cannot go unnoticed.
#[derive(Default)]
struct Answer {
    tokens: u32,
    text: String,
    finish: String,
}

impl Answer {
    fn add(&mut self, event: &octavo::GenerateEvent) -> Result<(), Status> {
        if event.first_index != self.tokens {
            let message = format!("token {} came, {} is due", event.first_index, self.tokens);
            return Err(Status::new(grpc::UNKNOWN, message));
        }
        self.tokens += event.token_ids.len() as u32;
        self.text += &event.text;
        if event.finish_reason != 0 {
            self.finish = finish_name(event.finish_reason);
        }
        match event.finished.as_ref().and_then(|finished| finished.failure.as_ref()) {
            Some(failure) => Err(Status::new(grpc::UNKNOWN, &failure.message)),
            None => Ok(()),
        }
    }

    fn summary(&self) -> String {
        format!("tokens={} finish={}", self.tokens, self.finish)
    }
}

fn finish_name(reason: i32) -> String {
    let name = octavo::FinishReason::from_i32(reason).map_or("UNKNOWN", |reason| reason.as_str_name());
    name.trim_start_matches("FINISH_REASON_").to_owned()
}

async fn health(routers: &[Channel]) -> Result<String, Status> {
    let request = health_v1::HealthCheckRequest { service: "octavo.v1.Inference".to_owned() };
    let reply: health_v1::HealthCheckResponse = routers[0].unary(CHECK, &request).await?;
    Ok(format!("status={}", reply.status().as_str_name()))
}

async fn stream(routers: &[Channel]) -> Result<String, Status> {
    let (mut answer, mut events) = (Answer::default(), follow(routers, new_request("Once upon a time", 24), None));
    while let Some(event) = events.next().await? {
        answer.add(&event)?;
        print!("{}", event.text);
        std::io::stdout().flush().ok();
    }
    println!();
    Ok(answer.summary())
}

async fn complete(routers: &[Channel]) -> Result<String, Status> {
    let reply: octavo::CompleteResponse = routers[0].unary(COMPLETE, &new_request("Il était une fois", 24)).await?;
    let (output, usage) = (&reply.outputs[0], reply.usage.unwrap_or_default());
    println!("{}", output.text);
    let finish = finish_name(output.finish_reason);
    Ok(format!("prompt_tokens={} tokens={} finish={finish}", usage.prompt_tokens, output.token_ids.len()))
}

async fn cancel(routers: &[Channel]) -> Result<String, Status> {
    let request = new_request("Count for ever: 1, 2, 3,", 1000);
    let what = octavo::CancelRequest { request_id: request.request_id.clone().unwrap_or_default() };
    let (mut answer, mut events) = (Answer::default(), follow(routers, request, None));
    while let Some(event) = events.next().await? {
        if answer.tokens == 0 {
            let _: octavo::CancelResponse = routers[0].unary(CANCEL, &what).await?;
        }
        answer.add(&event)?;
    }
    Ok(answer.summary())
}

async fn deadline(routers: &[Channel]) -> Result<String, Status> {
    let until = Instant::now() + Duration::from_secs(1);
    let request = new_request("Count for ever: 1, 2, 3,", 1000);
    let (mut answer, mut events) = (Answer::default(), follow(routers, request, Some(until)));
    while let Some(event) = events.next().await? {
        answer.add(&event)?;
    }
    Ok(answer.summary())
}

async fn errors(routers: &[Channel]) -> Result<String, Status> {
    let mut wrong = new_request("Hello", 1);
    if let Some(sampling) = &mut wrong.sampling {
        sampling.temperature = Some(-1.0);
        sampling.top_p = Some(2.0);
    }
    match routers[0].unary::<_, octavo::CompleteResponse>(COMPLETE, &wrong).await {
        Ok(_) => Err(Status::new(grpc::UNKNOWN, "two wrong fields were accepted")),
        Err(status) => {
            let told = explain(&status);
            Ok(format!("code={} reason={} fields={}", told.code.name(), told.reason, told.fields.join(",")))
        }
    }
}

async fn attach(routers: &[Channel]) -> Result<String, Status> {
    let (mut answer, mut events) =
        (Answer::default(), follow(routers, new_request("The story of a router:", 1000), None));
    while let Some(event) = events.next().await? {
        if answer.tokens == 0 {
            println!("attach reading from={}", routers[0].endpoint); // kill this router now
        }
        answer.add(&event)?;
    }
    println!("{}", answer.text);
    Ok(format!("attached={} status={} {}", events.attached, events.status.name(), answer.summary()))
}

type Part = for<'a> fn(&'a [Channel]) -> Pin<Box<dyn Future<Output = Result<String, Status>> + 'a>>;
const PARTS: [(&str, Part); 7] = [
    ("health", |routers| Box::pin(health(routers))),
    ("stream", |routers| Box::pin(stream(routers))),
    ("complete", |routers| Box::pin(complete(routers))),
    ("cancel", |routers| Box::pin(cancel(routers))),
    ("deadline", |routers| Box::pin(deadline(routers))),
    ("errors", |routers| Box::pin(errors(routers))),
    ("attach", |routers| Box::pin(attach(routers))),
];

fn main() -> std::process::ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.is_empty() {
        eprintln!("usage: client HOST:PORT[,HOST:PORT...] [part ...]");
        return 2.into();
    }
    let routers: Vec<Channel> = words[0].split(',').map(Channel::new).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut failed = false;
    for (name, part) in PARTS {
        if words.len() > 1 && !words[1..].iter().any(|word| word == name) {
            continue;
        }
        match runtime.block_on(part(&routers)) {
            Ok(line) => println!("{name} ok {line}"),
            Err(status) => {
                let told = explain(&status);
                let retry_ms = told.retry.as_millis();
                println!(
                    "{name} failed code={} reason={} retry_ms={retry_ms} {}",
                    told.code.name(),
                    told.reason,
                    status.message
                );
                failed = true;
            }
        }
    }
    u8::from(failed).into()
}
