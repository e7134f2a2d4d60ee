//! Transfers whose movers panic, under the fence and before it.

use std::time::Duration;

use pdkv_core::id::PeerKey;
use pdkv_core::plan::Plan;
use pdkv_device::Stop;

use super::*;
use crate::config::TransportKind;
use crate::far_look::FarLook;
use crate::transfer::{Path, Transfer, TransferCore, TransferState};
use crate::transport::Direction;
use crate::transport::tcp::{Dial, Socket};
use crate::transport::work::Program;
use crate::{Engine, EngineConfig};

/// Nobody is asked in these tests.
struct Nobody;

impl Dial for Nobody {
    fn open(&self, _stop: &dyn Stop) -> Result<Socket> {
        Err(Error::new(ErrorKind::PeerUnreachable, "test", "nobody is there"))
    }
}

fn fence() -> Arc<RawFence> {
    RawFence::new(Inquiry::Far(FarLook::new(Box::new(Nobody))))
}

fn work(engine: &Engine) -> Arc<Work> {
    let path = Path {
        transport: TransportKind::Cuda,
        rdma: false,
        detail: String::new(),
        reasons: Vec::new(),
    };
    let core = Arc::new(TransferCore::new(Arc::new(path)));
    let shared = engine.shared();
    shared.drive(|state, _| state.raw.begin(&core, PeerKey(1), Duration::MAX, None));
    let nothing = Program::Joint(Plan::spans(&[], &[], &[], &[]).unwrap());
    let work = Work::new(
        core,
        Arc::clone(shared),
        Direction::Read,
        nothing,
        None,
        Arc::default(),
        Arc::default(),
    );
    work.employ(1);
    Arc::new(work)
}

fn transfer(engine: &Engine, work: &Work) -> Transfer {
    Transfer::new(Arc::clone(&work.core), engine.shared())
}

fn ends(transfer: &Transfer) -> TransferState {
    while !transfer.quiesced() {
        std::thread::yield_now();
    }
    transfer.state()
}

#[test]
fn a_work_whose_hands_panic_ends_once_nobody_has_it_any_more() {
    let engine = Engine::new("engine", EngineConfig::default()).unwrap();
    let work = work(&engine);
    let (transfer, mine) = (transfer(&engine, &work), Arc::clone(&work));
    let panics = move || {
        let _work = mine;
        panic!("as the test wants");
    };
    engine.shared().movers.task(panics).unwrap();
    assert!(!transfer.quiesced(), "somebody has it still");
    drop(work);
    assert_eq!(ends(&transfer), TransferState::Failed);
}

#[test]
fn a_look_that_panics_fails_its_transfers_and_the_next_ones_are_looked_at() {
    let engine = Engine::new("engine", EngineConfig::default()).unwrap();
    let fence = fence();
    let works = [work(&engine), work(&engine)];
    let transfers = works.each_ref().map(|work| transfer(&engine, work));
    {
        // As if a thread were at it.
        let mut landed = fence.landed();
        landed.asked = true;
        landed.works = works.into_iter().map(|work| Placed { work, bytes: 1 }).collect();
    }
    fence.answer_all(|_, _| panic!("as the test wants"));
    for transfer in &transfers {
        assert_eq!(ends(transfer), TransferState::Failed);
    }
    assert!(!fence.landed().asked, "nobody asks any more, and nobody would again");
    let next = work(&engine);
    let last = transfer(&engine, &next);
    fence.enter(next, 0);
    assert_eq!(ends(&last), TransferState::Done);
}
