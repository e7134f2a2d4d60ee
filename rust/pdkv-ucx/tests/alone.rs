//! What needs a process of its own: forks, signal handlers, two copies at once, bytes that are no address.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use std::time::{Duration, Instant};

use common::cases::{lane, over};
use common::{Pair, copies, lanes, library, memory};
use pdkv_core::ErrorKind;
use pdkv_ucx::{Context, ErrorMode, Features, InboxLimits, Library, Origin, Settings, Tally, Worker};

#[test]
fn a_forked_child_is_refused() {
    over("case_a_forked_child_is_refused", &["all"]);
}

#[test]
fn case_a_forked_child_is_refused() {
    if lane().is_none() {
        return;
    }
    let pair = Pair::new(&library().unwrap(), &lanes("all"), ErrorMode::None);
    let (local, remote) = (memory(&pair.context, 4096, 1), memory(&pair.context, 4096, 2));
    let key = pair.key(&remote);
    let tally = Tally::new(&pair.near);
    // SAFETY: the child calls only what is refused at once, and ends without running anything else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let kinds = [
            pair.to_far.put(&local, 0, &key, 0, 64, &tally).unwrap_err().kind(),
            Worker::create(&pair.context).err().unwrap().kind(),
            Context::open(&library().unwrap(), &Settings::default(), Features::default())
                .err()
                .unwrap()
                .kind(),
            local.pack().unwrap_err().kind(),
        ];
        let refused = kinds.iter().all(|kind| *kind == ErrorKind::Unsupported) && !pair.near.progress();
        drop((key, tally, local, remote, pair));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child just made.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0), "the child was not refused");
    pair.to_far.put(&local, 0, &key, 0, 64, &tally).unwrap();
    pair.wait(&tally);
    assert!(tally.failure().is_none(), "the parent goes on");
}

#[test]
fn signal_handlers_stay_as_they_were() {
    over("case_signal_handlers_stay", &["all"]);
}

#[test]
fn case_signal_handlers_stay() {
    if lane().is_none() {
        return;
    }
    let before = handlers();
    let _pair = Pair::new(&library().unwrap(), &lanes("all"), ErrorMode::None);
    assert_eq!(before, handlers());
}

fn handlers() -> Vec<usize> {
    (1..=64)
        .map(|signal| {
            let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: asks only, and fills a struct of ours.
            unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
            // SAFETY: zeroed, and filled where the signal exists.
            unsafe { action.assume_init() }.sa_sigaction
        })
        .collect()
}

#[test]
fn bytes_that_are_no_address_or_key_are_refused() {
    over("case_bytes_that_are_no_address", &["all", "tcp"]);
}

#[test]
fn case_bytes_that_are_no_address() {
    let Some(tls) = lane() else { return };
    let pair = Pair::new(&library().unwrap(), &lanes(&tls), ErrorMode::None);
    let remote = memory(&pair.context, 4096, 2);
    let (address, key) = (pair.far.address().unwrap(), remote.pack().unwrap());
    for (whole, is_address) in [(&address, true), (&key, false)] {
        let mut seed = 7_u64;
        let refused = |bytes: &[u8]| {
            let error = if is_address {
                pair.near.connect(bytes, ErrorMode::None).err()
            } else {
                pair.to_far.unpack(bytes, 0x1000, 4096).err()
            };
            assert_eq!(
                error.map(|error| error.kind()),
                Some(ErrorKind::Handshake),
                "{} bytes",
                bytes.len()
            );
        };
        for len in 0..whole.len() {
            refused(&whole[..len]);
        }
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let at = 14 + (seed >> 33) as usize % (bytes.len() - 14);
            bytes[at] ^= 1 << ((seed >> 20) & 7);
            refused(&bytes);
            let random: Vec<u8> = (0..(seed >> 50) as usize).map(|at| (seed >> (at % 57)) as u8).collect();
            refused(&random);
        }
        refused(&vec![0xff; pdkv_ucx::SEALED_MAX_BYTES + 1]);
    }
    let refused = pair.to_far.unpack(&key, u64::MAX - 10, 4096).err().unwrap();
    assert_eq!(
        refused.kind(),
        ErrorKind::Handshake,
        "a range past the end of the address space"
    );
}

#[test]
fn addresses_that_lie_with_a_right_checksum_are_borne() {
    over("case_addresses_that_lie", &["all"]);
}

#[test]
fn case_addresses_that_lie() {
    let Some(tls) = lane() else { return };
    let pair = Pair::new(&library().unwrap(), &lanes(&tls), ErrorMode::None);
    let address = pair.far.address().unwrap();
    let mut seed = 11_u64;
    let mut next = || {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    for round in 0..60 {
        let raw: Vec<u8> = match round % 2 {
            0 => (0..=next() % 300).map(|_| next() as u8).collect(),
            _ => address[HEAD..HEAD + 1 + next() % (address.len() - HEAD)].to_vec(),
        };
        let connected = pair.near.connect(&sealed(&address, &raw), ErrorMode::None);
        if round % 2 == 0 && raw[0] & 15 > 1 {
            assert_eq!(connected.err().map(|error| error.kind()), Some(ErrorKind::Handshake));
        }
    }
    moves(&pair);
}

/// The length of what is put in front of UCX's bytes.
const HEAD: usize = 22;

/// UCX's bytes with a right length and checksum.
fn sealed(like: &[u8], raw: &[u8]) -> Vec<u8> {
    let sum = raw.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    [&like[..10], &(raw.len() as u32).to_le_bytes(), &sum.to_le_bytes(), raw].concat()
}

#[test]
fn copies_stand_side_by_side_or_are_refused() {
    let copies = copies();
    let Some(first) = copies.first() else { return };
    over("case_copies_side_by_side", &["all"]);
    println!("{} copies, first {}", copies.len(), first.display());
}

#[test]
fn case_copies_side_by_side() {
    if lane().is_none() {
        return;
    }
    let mine = library().unwrap();
    let pair = Pair::new(&mine, &lanes("all"), ErrorMode::None);
    let mut beside = Vec::new();
    for path in copies() {
        match Library::open(&path, Origin::Setting) {
            Ok(library) => {
                let other = Pair::new(&library, &lanes("all"), ErrorMode::None);
                beside.push(library.version());
                moves(&other);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(error.message().contains("beside another copy"), "{error:?}");
                assert!(error.hint().is_some());
                println!("note: {} refused", path.display());
            }
        }
    }
    moves(&pair);
    assert!(beside.contains(&mine.version()));
    println!("note: {} with {beside:?}", mine.version());
}

fn moves(pair: &Pair) {
    let (local, remote) = (memory(&pair.context, 65536, 1), memory(&pair.context, 65536, 2));
    let key = pair.key(&remote);
    let tally = Tally::new(&pair.near);
    pair.to_far.put(&local, 0, &key, 0, 65536, &tally).unwrap();
    pair.to_far.flush(&tally).unwrap();
    pair.wait(&tally);
    assert!(tally.failure().is_none());
    assert!(common::bytes(&remote, 0, 65536) == common::bytes(&local, 0, 65536));
}

#[test]
fn a_setting_that_ucx_refuses_is_an_error_with_its_words() {
    let Some(library) = library() else { return };
    let wish = |name: &str, value: &str| Settings::new([(name.to_owned(), value.to_owned())]);
    let open = |settings: &Settings| Context::open(&library, settings, Features::default());
    let error = open(&wish("UCX_TLS", "carrier_pigeon")).err().unwrap();
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let error = open(&wish("KEEPALIVE_INTERVAL", "soon")).err().unwrap();
    println!("{error}");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.message().contains("soon") && error.hint().is_some());
}

#[test]
fn a_sleeping_worker_is_woken() {
    let Some(library) = library() else { return };
    for tls in common::LANES {
        let pair = Pair::new(&library, &lanes(tls), ErrorMode::None);
        let inbox = pair.far.receive_messages(3, InboxLimits::default()).unwrap();
        while pair.near.progress() | pair.far.progress() {}
        while !pair.far.arm().unwrap() {
            pair.far.progress();
        }
        let tally = Tally::new(&pair.near);
        pair.to_far
            .send_message(3, b"wake", &[], pdkv_ucx::Delivery::Eager, &tally)
            .unwrap();
        let deadline = Instant::now() + common::PATIENCE;
        while !readable(&pair.far, Duration::from_millis(10)) {
            pair.near.progress();
            assert!(Instant::now() < deadline, "{tls}: nothing woke the worker");
        }
        pair.until("the message", || inbox.pop().is_some());
    }
}

fn readable(worker: &Worker, patience: Duration) -> bool {
    use std::os::fd::AsRawFd;
    let mut poll = libc::pollfd {
        fd: worker.event_fd().as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one struct of ours.
    unsafe { libc::poll(&raw mut poll, 1, patience.as_millis() as i32) > 0 }
}

#[test]
fn a_flooding_sender_is_dropped_at_the_limits() {
    let Some(library) = library() else { return };
    let pair = Pair::new(&library, &lanes("posix,cma"), ErrorMode::None);
    let limits = InboxLimits {
        messages: 10,
        eager_bytes: 4096,
    };
    let inbox = pair.far.receive_messages(3, limits).unwrap();
    let from = memory(&pair.context, 4096, 1);
    let piece = pdkv_ucx::Piece {
        memory: pdkv_ucx::PieceMemory::Mapped(from),
        offset: 0,
        len: 1000,
    };
    let tally = Tally::new(&pair.near);
    for _ in 0..100 {
        pair.to_far
            .send_message(3, b"", std::slice::from_ref(&piece), pdkv_ucx::Delivery::Eager, &tally)
            .unwrap();
    }
    pair.wait(&tally);
    pair.until("all messages", || inbox.dropped() == 96);
    let kept = std::iter::from_fn(|| inbox.pop()).count();
    assert_eq!(kept, 4, "four messages of 1000 bytes fit");
    pair.to_far
        .send_message(3, b"", &[piece], pdkv_ucx::Delivery::Eager, &tally)
        .unwrap();
    pair.until("one more, now that there is room", || inbox.pop().is_some());
}

#[test]
fn everything_outlives_its_worker_and_says_so() {
    let Some(library) = library() else { return };
    let pair = Pair::new(&library, &lanes("posix,cma"), ErrorMode::None);
    let inbox = pair.far.receive_messages(3, InboxLimits::default()).unwrap();
    let (local, remote) = (memory(&pair.context, 1 << 20, 1), memory(&pair.context, 1 << 20, 2));
    let key = pair.key(&remote);
    let (sent, received) = (Tally::new(&pair.near), Tally::new(&pair.far));
    let piece = |memory: &std::sync::Arc<_>| pdkv_ucx::Piece {
        memory: pdkv_ucx::PieceMemory::Mapped(std::sync::Arc::clone(memory)),
        offset: 0,
        len: 4096,
    };
    for delivery in [pdkv_ucx::Delivery::Eager, pdkv_ucx::Delivery::Rendezvous] {
        pair.to_far
            .send_message(3, b"", &[piece(&local)], delivery, &sent)
            .unwrap();
    }
    let mut incoming = Vec::new();
    pair.until("both messages", || {
        incoming.extend(inbox.pop());
        incoming.len() == 2
    });
    let Pair {
        near,
        far,
        to_far,
        to_near,
        context,
    } = pair;
    drop((near, far));
    for incoming in incoming {
        assert_eq!(
            incoming.receive(&[piece(&remote)], &received).unwrap_err().kind(),
            ErrorKind::Closed
        );
    }
    assert_eq!(
        to_far.put(&local, 0, &key, 0, 64, &sent).unwrap_err().kind(),
        ErrorKind::Closed
    );
    assert_eq!(to_far.flush(&sent).unwrap_err().kind(), ErrorKind::Closed);
    assert!(to_near.resources().is_empty() && inbox.pop().is_none());
    assert_eq!(sent.outstanding() + received.outstanding(), 0);
    let weak = std::sync::Arc::downgrade(&local);
    drop((local, remote, key, to_far, to_near, context));
    assert!(weak.upgrade().is_none(), "nothing holds the memory any more");
}

#[test]
fn few_descriptors_are_an_error_and_not_the_end() {
    over("case_few_descriptors", &["posix,cma", "tcp"]);
}

#[test]
fn case_few_descriptors() {
    let Some(tls) = lane() else { return };
    let library = library().unwrap();
    let context = Context::open(&library, &lanes(&tls), Features::default()).unwrap();
    let null = || std::fs::File::open("/dev/null");
    // SAFETY: lowers a limit of this process, which ends with this test.
    unsafe {
        libc::setrlimit(
            libc::RLIMIT_NOFILE,
            &libc::rlimit {
                rlim_cur: 200,
                rlim_max: 200,
            },
        )
    };
    let mut taken: Vec<_> = std::iter::repeat_with(null).map_while(Result::ok).collect();
    for _ in 0..39 {
        let refused = Worker::create(&context).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::Capacity, "{refused:?}");
        assert!(refused.hint().is_some());
        taken.pop();
    }
    taken.truncate(taken.len() - 20);
    Worker::create(&context).unwrap().address().unwrap();
}
