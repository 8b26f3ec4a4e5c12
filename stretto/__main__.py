from stretto.cli import main

main()
