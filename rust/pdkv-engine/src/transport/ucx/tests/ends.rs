//! In which order a lane is taken apart.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pdkv_core::Result;
use pdkv_core::lane::{Carrier, Manner};
use pdkv_core::plan::Plan;
use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::{Context, MemoryHandle, Worker};

use super::super::codec::Frame;
use super::super::control::Control;
use super::super::desk::Desk;
use super::super::door::Made;
use super::super::lane::{self, Rest, Role};
use super::{WAIT, engine, library};
use crate::transfer::{Path, TransferCore};
use crate::transport::work::Program;
use crate::transport::{Direction, Work};
use crate::{Engine, TransportKind};

/// A role that fails as only a bug can, with work on its hands.
struct Panics(Arc<Work>);

impl Role for Panics {
    fn hear(&mut self, _desk: &mut Desk, _made: &Made, _frame: Frame) -> Result<()> {
        Ok(())
    }

    fn step(&mut self, _desk: &mut Desk, _made: &Made) -> Result<bool> {
        panic!("on purpose")
    }

    fn watches(&self) -> bool {
        false
    }

    fn give_up(self: Box<Self>) -> Rest {
        Rest {
            works: vec![self.0],
            ..Rest::default()
        }
    }
}

/// A lane of this role, in a thread of its own.
fn taken_apart(
    engine: &Engine,
    context: Context,
    control: &Arc<Control>,
    role: impl FnOnce() -> Box<dyn Role> + Send + 'static,
) -> JoinHandle<()> {
    let (shared, mine) = (Arc::clone(engine.shared()), Arc::clone(control));
    std::thread::spawn(move || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let desk = Desk::new(&shared, &mine, stream).unwrap();
        let made = Made {
            manner: Manner::ActiveMessages,
            carrier: Carrier::Emulated,
            detail: String::new(),
            worker: Worker::create(&context).unwrap(),
            context,
            endpoint: None,
            inbox: None,
            lists: false,
        };
        lane::run(desk, made, role());
    })
}

/// A role that ends at once, and has lent memory until then.
struct Lends(Vec<Arc<MemoryHandle>>);

impl Role for Lends {
    fn hear(&mut self, _desk: &mut Desk, _made: &Made, _frame: Frame) -> Result<()> {
        Ok(())
    }

    fn step(&mut self, _desk: &mut Desk, _made: &Made) -> Result<bool> {
        Err(lane::stuck())
    }

    fn watches(&self) -> bool {
        false
    }

    fn give_up(self: Box<Self>) -> Rest {
        Rest {
            lent: self.0,
            ..Rest::default()
        }
    }
}

#[test]
fn a_lane_that_is_gone_leaves_ucx_nothing_to_undo() {
    // So many that the last of them goes well after the first.
    const MAPPINGS: usize = 20_000;
    let Some(library) = library() else { return };
    let engine = engine("engine", &library, true);
    let context = engine.shared().ucx.context(&engine.config().ucx, true).unwrap();
    let memory = HostRegion::allocate(1 << 16, HugePages::Never).unwrap();
    let lent: Vec<_> = (0..MAPPINGS)
        .map(|_| context.map(&memory.clone().into()).unwrap())
        .collect();
    let last = Arc::downgrade(&lent[MAPPINGS - 1]);
    let control = Control::new().unwrap();
    let lane = taken_apart(&engine, context, &control, move || Box::new(Lends(lent)));
    let started = Instant::now();
    while !control.is_gone() && started.elapsed() < WAIT.unwrap() {
        std::hint::spin_loop();
    }
    let undone = last.upgrade().is_none();
    lane.join().unwrap();
    assert!(undone, "a process that exits now would take UCX apart beside its calls");
}

#[test]
fn a_panic_on_a_lane_takes_it_apart_in_order() {
    let Some(library) = library() else { return };
    let engine = engine("engine", &library, false);
    let context = engine.shared().ucx.context(&engine.config().ucx, false).unwrap();
    let control = Control::new().unwrap();
    let path = Path {
        transport: TransportKind::Ucx,
        rdma: false,
        detail: String::new(),
        reasons: Vec::new(),
    };
    let nothing = Program::Joint(Plan::spans(&[], &[], &[], &[]).unwrap());
    let (core, shared) = (Arc::new(TransferCore::new(Arc::new(path))), Arc::clone(engine.shared()));
    let work = Arc::new(Work::new(
        core,
        shared,
        Direction::Read,
        nothing,
        None,
        Arc::default(),
        Arc::default(),
    ));
    work.employ(1);
    // Work that leaves is reported under this lock: it must not have to be let in before the worker is gone.
    let held = engine.shared().lock();
    let lane = taken_apart(&engine, context, &control, {
        let work = Arc::clone(&work);
        move || Box::new(Panics(work))
    });
    let started = Instant::now();
    while !control.is_gone() && started.elapsed() < WAIT.unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let in_order = control.is_gone();
    drop(held);
    lane.join().unwrap();
    assert!(in_order, "the work left before the worker was gone");
    assert!(work.failed() && !control.takes_work(), "nobody would ever do it");
}
