//! Who asks at the local socket for the names of a GPU's memory, and of what: a name is all that it takes to map it.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use pdkv_core::id::{RegionId, SessionToken};
use pdkv_core::wire::HelloAck;
use pdkv_engine::{Engine, Region, TransportKind};
use rustix::process::Uid;

use crate::common::fake::{Wire, hello_from_here};
use crate::common::standin::{is_here, replace};
use crate::common::{Memory, WAIT, engine, memory};
use crate::eventually;

const LEN: u64 = 4096;
const MAGIC: [u8; 4] = *b"PKDL";
const LEND: u8 = 2;
/// Words that come before the extents of a region, and at the end.
const HEAD: usize = 24;
const END: u64 = u64::MAX;
const NOTHING: &[u8] = &[];

/// An engine with memory of a GPU, and sessions with it that the test plays.
struct Owner {
    engine: Engine,
    region: Region,
    socket: SocketAddr,
}

impl Owner {
    fn new(kind: Memory) -> Self {
        let engine = engine("owner", &[TransportKind::Cuda]);
        let region = engine.register(memory(kind, LEN), None, true).unwrap();
        let (_wire, ack) = session(&engine);
        let socket = SocketAddr::from_abstract_name(&ack.hello.host.local_socket).unwrap();
        Self { engine, region, socket }
    }

    /// All that whoever has this token, and begins with these bytes, is answered.
    fn answer(&self, magic: [u8; 4], token: &SessionToken, id: RegionId) -> Vec<u8> {
        let mut stream = UnixStream::connect_addr(&self.socket).unwrap();
        stream.set_read_timeout(WAIT).unwrap();
        let mut question = [
            magic.as_slice(),
            &[LEND, 0, 0, 0],
            token.as_bytes(),
            &1_u32.to_le_bytes(),
        ]
        .concat();
        question.extend(id.0.to_le_bytes());
        // One that is hung up on may not even be able to ask.
        let _ = stream.write_all(&question);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    fn asked_by(&self, ack: &HelloAck) -> Vec<u8> {
        self.answer(MAGIC, &ack.token, self.region.id())
    }
}

fn session(engine: &Engine) -> (Wire, HelloAck) {
    let mut wire = Wire::connect(engine.address().unwrap());
    let ack = wire.shake_hands_as(hello_from_here());
    (wire, ack)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Whether an answer names the region's memory.
fn names(answer: &[u8], id: RegionId) -> bool {
    answer.len() > 2 * HEAD && word(answer, 0) == id.0 && word(answer, 8) == 1
}

#[test]
fn who_is_not_proven_is_told_no_name() {
    if !is_here("asking::who_is_not_proven_is_told_no_name") {
        return;
    }
    let owner = Owner::new(Memory::Malloc);
    let id = owner.region.id();
    let (wire, ack) = session(&owner.engine);
    assert!(names(&owner.asked_by(&ack), id), "else the rest shows nothing");

    let mut near = *ack.token.as_bytes();
    near[15] ^= 1;
    for token in [
        SessionToken::new([0; 16]),
        SessionToken::new([9; 16]),
        SessionToken::new(near),
    ] {
        assert_eq!(owner.answer(MAGIC, &token, id), NOTHING, "a token of no session");
    }
    assert_eq!(owner.answer(*b"PKDV", &ack.token, id), NOTHING, "another protocol");

    // Credentials are each thread's own, and only the administrator may have others.
    if rustix::process::geteuid().is_root() {
        let nobody = Uid::from_raw(65_534);
        let answer = std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
                owner.asked_by(&ack)
            });
            other.join().unwrap()
        });
        assert_eq!(answer, NOTHING, "another user, with a token that he was told");
    }
    assert!(
        names(&owner.asked_by(&ack), id),
        "nobody else's question costs the session anything"
    );

    drop(wire);
    eventually("the end of a session is the end of its token", || {
        owner.asked_by(&ack).is_empty()
    });
    owner.engine.close();
}

#[test]
fn what_is_not_there_any_more_is_not_named() {
    if !is_here("asking::what_is_not_there_any_more_is_not_named") {
        return;
    }
    let owner = Owner::new(Memory::Segments);
    let id = owner.region.id();
    let (_wire, ack) = session(&owner.engine);
    assert!(names(&owner.asked_by(&ack), id), "else the rest shows nothing");

    let unknown = owner.answer(MAGIC, &ack.token, RegionId(id.0 + 1));
    assert_eq!(
        (unknown.len(), word(&unknown, 0)),
        (HEAD, END),
        "a region that there is not"
    );

    replace(owner.region.memory().address());
    let replaced = owner.asked_by(&ack);
    assert!(!names(&replaced, id));
    let reason = String::from_utf8_lossy(&replaced[HEAD..replaced.len() - HEAD]).into_owned();
    assert!(reason.contains("other memory"), "{reason}");

    owner.region.deregister().unwrap();
    let gone = owner.asked_by(&ack);
    assert_eq!(
        (gone.len(), word(&gone, 0)),
        (HEAD, END),
        "a region that was deregistered"
    );
    owner.engine.close();
}
