//! The one binary of sublet. Each command is a module; what they share is how they fail: one line
//! on stderr and an exit code of `exit`.

mod api_flags;
mod arbiter_command;
mod args;
mod as_begun;
mod cdi;
mod cluster_command;
mod config;
mod config_command;
mod connect;
mod demo;
mod dilation;
mod doctor;
mod events;
mod exit;
mod file_limit;
mod flags;
mod frontend;
mod groups;
mod interfere;
mod json;
mod kernel;
mod kubernetes_command;
mod manual;
mod metrics;
mod mistake;
mod moves;
mod printable;
mod ps;
mod record;
mod recording;
mod replay;
mod run;
mod set;
mod simulate;
mod table;
mod tls_flags;
mod top;
mod trace;
mod unmanaged;
mod when;
mod whole_file;

use std::io::{self, Write};
use std::process::ExitCode;

use args::{Command, ConfigCommand, DeviceCommand, Early, KernelCommand};
use exit::{FAILED, Failure};
use frontend::args::FrontendCommand;

fn main() -> ExitCode {
    let cli = match args::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(Early::Show(text)) => return show(&text),
        Err(Early::Wrong(message)) => {
            return fail(&Failure::with_code(FAILED, anyhow::anyhow!(message)));
        }
    };
    let printed = match cli.command {
        Command::Demo(args) => {
            return match demo::demo(&args) {
                Ok((text, true)) => show(&text),
                Ok((text, false)) => {
                    show(&text);
                    ExitCode::FAILURE
                }
                Err(failure) => fail(&failure),
            };
        }
        Command::Doctor(args) => {
            return match doctor::doctor(&args) {
                Ok((text, 0)) => show(&text),
                Ok((text, code)) => {
                    show(&text);
                    ExitCode::from(code)
                }
                Err(failure) => fail(&failure),
            };
        }
        Command::Events(args) => {
            return match events::events(&args) {
                Ok(()) => ExitCode::SUCCESS,
                Err(failure) => fail(&failure),
            };
        }
        Command::Interfere(args) => {
            return match interfere::interfere(&args) {
                Ok((text, ended)) => {
                    show(&text);
                    ended.map_or_else(|failure| fail(&failure), ExitCode::from)
                }
                Err(failure) => fail(&failure),
            };
        }
        Command::Record(args) => {
            return match record::record(&args) {
                Ok(code) => ExitCode::from(code),
                Err(failure) => fail(&failure),
            };
        }
        Command::Replay(args) => replay::replay(&args),
        Command::Metrics(args) => metrics::metrics(&args),
        Command::Top(args) => {
            return match top::top(&args) {
                Ok(()) => ExitCode::SUCCESS,
                Err(failure) => fail(&failure),
            };
        }
        Command::Trace(args) => trace::trace(&args),
        Command::Evict(args) => return moved(moves::evict(&args)),
        Command::Restore(args) => return moved(moves::restore(&args)),
        Command::Switch(args) => return moved(moves::switch(&args)),
        Command::Acquire(args) => {
            return match groups::acquire(&args) {
                Ok((text, true)) => show(&text),
                Ok((text, false)) => {
                    show(&text);
                    ExitCode::from(groups::NO_TURN)
                }
                Err(failure) => fail(&failure),
            };
        }
        Command::Yield(args) => groups::give_up(&args),
        Command::Groups(args) => groups::list(&args),
        Command::Timeslice(args) => groups::timeslice(&args),
        Command::Frontend(args) => match args.command {
            FrontendCommand::Run(args) => frontend::run(&args),
            FrontendCommand::Status(args) => frontend::status(&args),
        },
        Command::Run(args) => Err(run::run(args)),
        Command::Ps(args) => ps::ps(&args),
        Command::Set(args) => set::set(&args),
        Command::Pause(args) => set::pause(&args, true),
        Command::Resume(args) => set::pause(&args, false),
        Command::Device(args) => match args.command {
            DeviceCommand::Set(args) => set::device(&args),
        },
        Command::Cdi(args) => match args.command {
            cdi::args::CdiCommand::Generate(args) => cdi::generate(&args),
        },
        Command::Kernel(args) => match args.command {
            KernelCommand::Install(args) => kernel::install(&args),
            KernelCommand::List(place) => kernel::list(&place),
            KernelCommand::Remove(args) => kernel::remove(&args),
        },
        Command::Reload(args) => set::reload(&args),
        Command::Arbiter(args) => arbiter_command::run(args).map(|()| String::new()),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Cluster(args) => cluster_command::cluster(&args),
        Command::Kubernetes(args) => kubernetes_command::kubernetes(&args),
        Command::Config(args) => match args.command {
            ConfigCommand::Check(args) => {
                return match config_command::check(&args) {
                    Ok((text, code)) => {
                        show(&text);
                        ExitCode::from(code)
                    }
                    Err(failure) => fail(&failure),
                };
            }
            ConfigCommand::Show(args) => config_command::show(&args),
            ConfigCommand::Schema(args) if args.markdown => Ok(config::markdown::text()),
            ConfigCommand::Schema(_) => Ok(config::schema::text()),
        },
        Command::Completions(args) => Ok(manual::completions(&args)),
        Command::Man(args) => manual::man(&args),
    };
    match printed {
        Ok(text) => show(&text),
        Err(failure) => fail(&failure),
    }
}

/// What came of a move; the JSON of one that was not done is shown all the same.
fn moved(moved: exit::Result<(String, bool)>) -> ExitCode {
    match moved {
        Ok((text, true)) => show(&text),
        Ok((text, false)) => {
            show(&text);
            ExitCode::from(FAILED)
        }
        Err(failure) => fail(&failure),
    }
}

/// A reader that has had enough (`| head`) is no failure.
fn show(text: &str) -> ExitCode {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            let error = anyhow::anyhow!("cannot write to stdout: {error}");
            fail(&Failure::with_code(FAILED, error))
        }
        _ => ExitCode::SUCCESS,
    }
}

fn fail(failure: &Failure) -> ExitCode {
    // Where stderr is gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "{}", failure.line());
    ExitCode::from(failure.code)
}

#[cfg(test)]
testbed::starts_clean!();
