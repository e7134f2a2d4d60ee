//! Memory that goes away behind an engine's back: the kernel finds it gone, and no transfer over it counts as done.

mod common;

use std::sync::Arc;

use common::fake::Wire;
use common::lane::{self, answer, ask, request, words};
use common::ucx::{self, Lane};
use common::{Memory, Pair, WAIT, Way, allocate};
use pdkv_core::ErrorKind;
use pdkv_device::HostRegion;
use pdkv_engine::{LocalSpan, RawOptions, RemoteSpan, TransportKind};
use pdkv_ucx::{Delivery, Piece, PieceMemory, Tally};
use rustix::mm::{MprotectFlags, mprotect};

/// One message of one piece, which the kernel carries whole.
const LEN: u64 = 1 << 20;

/// Memory that nobody may read or write, the kernel included, until this goes: as if it had been unmapped.
struct Hidden(Arc<HostRegion>);

impl Hidden {
    fn new(region: &Arc<HostRegion>) -> Self {
        let hidden = Self(Arc::clone(region));
        hidden.allow(MprotectFlags::empty());
        hidden
    }

    fn allow(&self, rights: MprotectFlags) {
        let start = std::ptr::with_exposed_provenance_mut(self.0.address() as usize);
        // SAFETY: whole pages of a pool of this test's own, which nothing in this process touches while they are hidden.
        unsafe { mprotect(start, self.0.len() as usize, rights) }.expect("whole pages of a mapping");
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        self.allow(MprotectFlags::READ | MprotectFlags::WRITE);
    }
}

fn pattern(seed: u64) -> Vec<u8> {
    (0..LEN).map(|at| common::byte(seed, 0, 0, at)).collect()
}

fn content(region: &HostRegion) -> Vec<u8> {
    let mut bytes = vec![0; LEN as usize];
    region.read_at(0, &mut bytes).unwrap();
    bytes
}

/// Reads and writes whole regions, with the source there, gone, and there again.
fn over(way: Way) {
    for write in [false, true] {
        let pair = Pair::new(way);
        let register =
            |engine: &pdkv_engine::Engine| engine.register(allocate(Memory::Shared, LEN), None, true).unwrap();
        let (here, there) = (register(&pair.consumer), register(&pair.producer));
        let near = [LocalSpan {
            region: here.id(),
            offset: 0,
            len: LEN,
        }];
        let far = [RemoteSpan {
            region: there.describe().region,
            offset: 0,
            len: LEN,
        }];
        let (from, to) = if write {
            (here.memory().host().unwrap(), there.memory().host().unwrap())
        } else {
            (there.memory().host().unwrap(), here.memory().host().unwrap())
        };
        let transfer = || {
            let options = RawOptions::default();
            let started = if write {
                pair.peer.write(&far, &near, None, &options)
            } else {
                pair.peer.read(&near, &far, None, &options)
            };
            let transfer = started?;
            let outcome = transfer.wait(WAIT);
            assert!(transfer.wait_quiesced(WAIT));
            outcome
        };
        for seed in [1, 2] {
            from.write_at(0, &pattern(seed)).unwrap();
            transfer().unwrap();
            assert!(content(to) == pattern(seed), "{way:?}, write {write}, round {seed}");
            to.fill(0, LEN, 0).unwrap();
            let hidden = Hidden::new(from);
            let error = transfer().expect_err("memory that is gone was copied");
            // Nobody says what was wrong: to UCX and to the kernel it might as well be the peer that is gone.
            let typed = [ErrorKind::PeerLost, ErrorKind::Region, ErrorKind::Transfer];
            assert!(typed.contains(&error.kind()), "{way:?}, write {write}: {error:?}");
            drop(hidden);
            assert!(
                content(to).iter().all(|&byte| byte == 0),
                "{way:?}, write {write}: something was copied"
            );
        }
    }
}

#[test]
fn cma() {
    over(TransportKind::Cma.into());
}

#[test]
fn ucx_kernel() {
    if ucx::is_here() {
        over(Lane::kernel("posix,cma").into());
    }
}

#[test]
fn ucx_messages() {
    if ucx::is_here() {
        over(Lane::messages("posix,cma").into());
        over(Lane::messages("sysv,cma").into());
    }
}

#[test]
fn an_owner_that_cannot_fetch_what_it_was_sent_says_so() {
    if !ucx::is_here() {
        return;
    }
    let owner = Way::from(Lane::messages("posix,cma")).engine("owner");
    let region = owner.register(allocate(Memory::Shared, LEN), None, true).unwrap();
    let mut wire = Wire::connect(owner.address().unwrap());
    let stream = lane::open(owner.address().unwrap(), wire.shake_hands().token);
    let (mut player, endpoint) = lane::messages(stream, "posix,cma");
    let span = words(&[region.id().0, 0, LEN]);
    player.send(&ask(1, &[request(true, true, 0, 0, 1, LEN), span].concat()));
    player.expect(lane::GO);
    let memory = allocate(Memory::Shared, LEN);
    let _hidden = Hidden::new(&memory);
    let piece = Piece {
        memory: PieceMemory::Plain(memory),
        offset: 0,
        len: LEN,
    };
    let tally = Tally::new(&player.worker);
    endpoint
        .send_message(lane::MESSAGES, &words(&[1]), &[piece], Delivery::Rendezvous, &tally)
        .unwrap();
    assert_eq!(answer(&mut player, 1), ErrorKind::PeerLost as u16);
    assert!(content(region.memory().host().unwrap()).iter().all(|&byte| byte == 0));
}
