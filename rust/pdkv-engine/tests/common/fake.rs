//! The other end of a connection, played by the test: it speaks the wire schema and nothing else, so
//! it can say what no engine would.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pdkv_core::id::{Incarnation, SessionToken, TransferId};
use pdkv_core::plan::WireOrder;
use pdkv_core::reference::Reference;
use pdkv_core::session::{self, features};
use pdkv_core::wire::{self, Claim, FrameDecoder, Hello, HostFacts, MAX_FRAME, Message};

/// One connection on which the test speaks.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    decoder: FrameDecoder,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .expect("a timeout");
        Self {
            stream,
            decoder: FrameDecoder::new(MAX_FRAME),
        }
    }

    pub(crate) fn connect(address: &str) -> Self {
        Self::new(TcpStream::connect(address).expect("the engine listens"))
    }

    pub(crate) fn send(&mut self, message: &Message) {
        self.stream
            .write_all(&wire::encode(message).expect("encodes"))
            .expect("sends");
    }

    /// The next message that isn't a heartbeat; `None` when the other side closed.
    pub(crate) fn receive(&mut self) -> Option<Message> {
        let mut buffer = [0; 4096];
        loop {
            match self.decoder.next().expect("an engine speaks the protocol") {
                Some(Message::Ping(_) | Message::Pong(_)) => {}
                Some(message) => return Some(message),
                None => match self.stream.read(&mut buffer) {
                    Ok(0) => return None,
                    Ok(count) => self.decoder.push(&buffer[..count]),
                    Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                    Err(error) => panic!("nothing came for a minute: {error}"),
                },
            }
        }
    }

    /// Shakes hands as the connecting side.
    pub(crate) fn shake_hands(&mut self) -> wire::HelloAck {
        self.shake_hands_as(hello())
    }

    /// Shakes hands as somebody in particular.
    pub(crate) fn shake_hands_as(&mut self, hello: Hello) -> wire::HelloAck {
        self.send(&Message::Hello(Box::new(Hello {
            attempt: [7; 16],
            ..hello
        })));
        match self.receive() {
            Some(Message::HelloAck(ack)) => *ack,
            other => panic!("the hello was answered with {other:?}"),
        }
    }
}

/// A plausible hello of an engine on no host of ours.
pub(crate) fn hello() -> Hello {
    Hello {
        min_version: session::MIN_VERSION,
        max_version: session::MAX_VERSION,
        features: features::OURS,
        name: "fake".to_owned(),
        incarnation: Incarnation::new([1; 16]),
        address: String::new(),
        host: HostFacts::default(),
        peer_timeout: Duration::from_secs(60),
        heartbeat: Duration::from_secs(1),
        regions: Vec::new(),
        caches: Vec::new(),
        attempt: [0; 16],
    }
}

/// A claim of all that a reference names, over tcp, of a cache of these tests.
pub(crate) fn claim(transfer: u64, reference: &Reference, fingerprint: [u8; 32]) -> Claim {
    Claim {
        transfer: TransferId(transfer),
        reference: reference.clone(),
        expected_digest: None,
        expected_fingerprint: fingerprint,
        first_block: 0,
        num_blocks: reference.num_blocks,
        first_layer: 0,
        num_layers: super::LAYERS as u32,
        transport: "tcp".to_owned(),
        remaining: Duration::from_secs(60),
        wants_table: false,
        order: Some(WireOrder::LAYER_MAJOR),
    }
}

/// A hello of a process on this host that outlives the test.
pub(crate) fn hello_from_here() -> Hello {
    let facts = pdkv_device::host_facts();
    Hello {
        host: HostFacts {
            pid: std::os::unix::process::parent_id(),
            boot_id: facts.boot_id,
            pid_namespace: facts.pid_namespace,
            ..HostFacts::default()
        },
        ..hello()
    }
}

/// A local socket of this process under a name such as engines give theirs.
pub(crate) fn door() -> (UnixListener, String) {
    static DOORS: AtomicU32 = AtomicU32::new(0);
    let number = DOORS.fetch_add(1, Ordering::Relaxed);
    let name = format!("pdkv-{:016x}{number:016x}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).expect("a short name");
    (UnixListener::bind_addr(&address).expect("a name of its own"), name)
}

/// An owner played by the test: accepts one engine and hands its wire to `script`.
pub(crate) fn owner(
    answer: Hello,
    script: impl FnOnce(Wire) + Send + 'static,
) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = listener.local_addr().expect("bound").to_string();
    let thread = std::thread::spawn(move || {
        let mut wire = Wire::new(listener.accept().expect("somebody connects").0);
        let Some(Message::Hello(theirs)) = wire.receive() else {
            panic!("no hello came")
        };
        let token = SessionToken::new([3; 16]);
        let (ack, _) = session::accept(&answer, token, *theirs).expect("a good hello");
        wire.send(&ack);
        script(wire);
    });
    (address, thread)
}

/// As [`owner`], for scripts that accept streams of the session too.
pub(crate) fn owner_with_streams(
    answer: Hello,
    script: impl FnOnce(Wire, TcpListener) + Send + 'static,
) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("binds");
    let address = listener.local_addr().expect("bound").to_string();
    let thread = std::thread::spawn(move || {
        let mut wire = Wire::new(listener.accept().expect("somebody connects").0);
        let Some(Message::Hello(theirs)) = wire.receive() else {
            panic!("no hello came")
        };
        let (ack, _) = session::accept(&answer, SessionToken::new([3; 16]), *theirs).expect("a good hello");
        wire.send(&ack);
        script(wire, listener);
    });
    (address, thread)
}

/// Reads a stream's hello and answers it.
pub(crate) fn greet_stream(stream: &mut TcpStream) {
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("a frame");
    let mut hello = vec![0; u32::from_le_bytes(length) as usize];
    stream.read_exact(&mut hello).expect("a hello");
    stream.write_all(&[0xA5]).expect("answers");
}
