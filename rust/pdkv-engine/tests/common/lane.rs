//! The other end of a lane's side channel, played by the test: it lays the frames out by hand, so it can say
//! what no engine would, and drives a real worker where payload is needed.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use pdkv_core::id::{Incarnation, SessionToken};
use pdkv_core::wire::{self, Message, StreamHello, StreamPurpose};
use pdkv_ucx::find::{self, Search};
use pdkv_ucx::{Context, Delivery, Endpoint, ErrorMode, Features, Inbox, InboxLimits, Settings, Tally, Worker};

pub(crate) const OFFER: u8 = 1;
pub(crate) const ACCEPT: u8 = 2;
pub(crate) const DECLINE: u8 = 3;
pub(crate) const VERDICT: u8 = 4;
pub(crate) const READY: u8 = 5;
pub(crate) const WANT_KEY: u8 = 6;
pub(crate) const KEY: u8 = 7;
pub(crate) const NO_KEY: u8 = 8;
pub(crate) const ASK: u8 = 9;
pub(crate) const GO: u8 = 10;
pub(crate) const NEVER: u8 = 11;
pub(crate) const ANSWER: u8 = 12;
pub(crate) const LAND: u8 = 13;
pub(crate) const LANDED: u8 = 14;

/// The id of active messages, as `transport/ucx/door.rs` has it.
pub(crate) const MESSAGES: u16 = 0x70;

pub(crate) fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut raw = 0x5544_4B50_u32.to_le_bytes().to_vec();
    raw.extend([kind, 0, 0, 0]);
    raw.extend((body.len() as u32).to_le_bytes());
    raw.extend([0; 4]);
    raw.extend(body);
    raw
}

pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(crate) fn word(raw: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(raw[at..at + 8].try_into().expect("eight bytes"))
}

/// An offer of a lane: one-sided or of messages, with this worker's address.
pub(crate) fn offer(messages: bool, address: &[u8]) -> Vec<u8> {
    let mut body = vec![u8::from(messages), 0, 0, 0, 0, 0, 0, 0];
    body.extend(address);
    frame(OFFER, &body)
}

/// A request as `transport/request.rs` lays it out, asked under a number.
pub(crate) fn ask(id: u64, request: &[u8]) -> Vec<u8> {
    frame(ASK, &[&id.to_le_bytes(), request].concat())
}

/// A request as `transport/request.rs` lays it out.
pub(crate) fn request(put: bool, spans: bool, transfer: u64, first: u64, units: u64, bytes: u64) -> Vec<u8> {
    let mut raw = 0x5144_4B50_u32.to_le_bytes().to_vec();
    raw.extend([u8::from(put), u8::from(spans), 0, 0]);
    raw.extend(words(&[transfer, first, units, bytes]));
    raw
}

/// A side channel of the session, past its greeting.
pub(crate) fn open(address: &str, token: SessionToken) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the engine listens");
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a timeout");
    let hello = StreamHello {
        token,
        incarnation: Incarnation::new([1; 16]),
        index: 0,
        purpose: StreamPurpose::UcxLane,
    };
    stream
        .write_all(&wire::encode(&Message::StreamHello(hello)).expect("encodes"))
        .expect("sends");
    let mut ready = [0];
    stream.read_exact(&mut ready).expect("is greeted");
    stream
}

/// The next frame of a stream without a worker; `None` at its end.
pub(crate) fn next(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut header = [0; 16];
    stream.read_exact(&mut header).ok()?;
    let mut body = vec![0; u32::from_le_bytes(header[8..12].try_into().expect("four bytes")) as usize];
    stream.read_exact(&mut body).ok()?;
    Some((header[4], body))
}

enum Heard {
    Frame(u8, Vec<u8>),
    End,
}

/// A worker of the test's own.
pub(crate) struct Player {
    pub(crate) context: Context,
    pub(crate) worker: Worker,
    inbox: Inbox,
    stream: TcpStream,
    input: Vec<u8>,
}

impl Player {
    /// One over these of UCX's transports.
    pub(crate) fn new(stream: TcpStream, tls: &str, one_sided: bool) -> Self {
        let search = Search {
            explicit: super::ucx::copies().into_iter().next(),
            ..Search::default()
        };
        let library = find::find(&search).0.expect("a copy of UCX");
        let settings = Settings::new([("TLS".to_owned(), tls.to_owned())]);
        let context = Context::open(&library, &settings, Features { one_sided }).expect("a context");
        let worker = Worker::create(&context).expect("a worker");
        let inbox = worker
            .receive_messages(MESSAGES, InboxLimits::default())
            .expect("an inbox");
        stream.set_nonblocking(true).expect("a socket");
        Self {
            context,
            worker,
            inbox,
            stream,
            input: Vec::new(),
        }
    }

    pub(crate) fn send(&mut self, raw: &[u8]) {
        self.stream.set_nonblocking(false).expect("a socket");
        self.stream.write_all(raw).expect("sends");
        self.stream.set_nonblocking(true).expect("a socket");
    }

    /// Drives the worker until something is there.
    pub(crate) fn until<T>(&mut self, mut look: impl FnMut(&mut Self) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            self.worker.progress();
            if let Some(found) = look(self) {
                return found;
            }
            assert!(started.elapsed() < Duration::from_secs(60), "nothing came for a minute");
            std::thread::yield_now();
        }
    }

    fn poll(&mut self) -> Option<Heard> {
        if self.input.len() >= 16 {
            let len = u32::from_le_bytes(self.input[8..12].try_into().expect("four bytes")) as usize;
            if self.input.len() >= 16 + len {
                let kind = self.input[4];
                let body = self.input[16..16 + len].to_vec();
                self.input.drain(..16 + len);
                return Some(Heard::Frame(kind, body));
            }
        }
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer) {
            Ok(0) => Some(Heard::End),
            Ok(count) => {
                self.input.extend(&buffer[..count]);
                None
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            Err(_) => Some(Heard::End),
        }
    }

    /// The next frame, the worker driven meanwhile; `None` at the end of the channel.
    pub(crate) fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        match self.until(Self::poll) {
            Heard::Frame(kind, body) => Some((kind, body)),
            Heard::End => None,
        }
    }

    /// The next frame, which must be of this kind.
    pub(crate) fn expect(&mut self, kind: u8) -> Vec<u8> {
        let (got, body) = self.next().expect("a frame");
        assert_eq!(got, kind, "{}", String::from_utf8_lossy(&body));
        body
    }

    pub(crate) fn connect(&self, address: &[u8]) -> Endpoint {
        self.worker.connect(address, ErrorMode::None).expect("an endpoint")
    }

    /// Sends a message headed like this, without waiting for anybody.
    pub(crate) fn message(&mut self, endpoint: &Endpoint, header: &[u8], payload: &[u8]) -> Tally {
        let memory = pdkv_device::HostRegion::allocate(4096, pdkv_device::HugePages::Never).expect("a page");
        memory.write_at(0, payload).expect("fits");
        let piece = pdkv_ucx::Piece {
            memory: pdkv_ucx::PieceMemory::Plain(memory),
            offset: 0,
            len: payload.len() as u64,
        };
        let pieces = if payload.is_empty() { vec![] } else { vec![piece] };
        let tally = Tally::new(&self.worker);
        endpoint
            .send_message(MESSAGES, header, &pieces, Delivery::Eager, &tally)
            .expect("sends");
        tally
    }

    /// The header and size of the next message.
    pub(crate) fn arrived(&mut self) -> (Vec<u8>, u64) {
        self.until(|player| {
            player
                .inbox
                .pop()
                .map(|message| (message.header.clone(), message.len()))
        })
    }
}

/// A lane of messages over these of UCX's transports, agreed on.
pub(crate) fn messages(stream: TcpStream, tls: &str) -> (Player, Endpoint) {
    let mut player = Player::new(stream, tls, false);
    let address = player.worker.address().expect("an address");
    player.send(&offer(true, &address));
    let accept = player.expect(ACCEPT);
    let endpoint = player.connect(&accept[16..16 + word(&accept, 8) as usize]);
    player.message(&endpoint, &[0; 8], b"");
    assert_eq!(player.arrived(), (vec![0; 8], 0), "the hello comes back");
    (player, endpoint)
}

/// The code of the answer to a request, which must be of this number.
pub(crate) fn answer(player: &mut Player, id: u64) -> u16 {
    let body = player.expect(ANSWER);
    assert_eq!(word(&body, 0), id);
    word(&body, 8) as u16
}
